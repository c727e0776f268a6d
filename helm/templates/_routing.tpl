{{- /* Alertmanager configuration as JSON: files/routing.yaml, which has all receivers, reduced to those that the values
configure. Takes a list: the root, and the form, alertmanager or alertmanagerConfig. */}}
{{- define "flopwatch.routing" -}}
{{- $root := index . 0 }}
{{- $values := $root.Values.routing }}
{{- $text := $root.Files.Get "files/routing.yaml" }}
{{- range $name, $value := dict "SLACK_SECRET" $values.slackSecret "PAGERDUTY_SECRET" $values.pagerdutySecret "WATCHDOG_SECRET" $values.watchdogSecret "WEBHOOK_SECRET" $values.webhookSecret "EMAIL_SECRET" $values.email.passwordSecret "EMAIL_TO" $values.email.to "EMAIL_FROM" $values.email.from "EMAIL_SMARTHOST" $values.email.smarthost }}
{{- $text = replace $name $value $text }}
{{- end }}
{{- if not $root.Values.rules.runbookUrl }}
{{- $text = replace "<{{ .CommonAnnotations.runbook_url }}|{{ .CommonLabels.alertname }}>" "{{ .CommonAnnotations.runbook_url }}" $text }}
{{- end }}
{{- if not $root.Values.rules.dashboardUrl }}
{{- $text = regexReplaceAll "(?m)^ *title(Link|_link): .*\n" $text "" }}
{{- end }}
{{- $config := index (fromYaml $text) (index . 1) }}
{{- $asked := list }}
{{- range $name, $value := dict "slack" $values.slackSecret "pagerduty" $values.pagerdutySecret "watchdog" $values.watchdogSecret "webhook" $values.webhookSecret "email" $values.email.to }}
{{- if $value }}
{{- $asked = append $asked $name }}
{{- end }}
{{- end }}
{{- if not (without $asked "watchdog") }}
{{- fail "routing.kind needs a receiver: set routing.slackSecret, pagerdutySecret, webhookSecret or email.to" }}
{{- end }}
{{- $receivers := list }}
{{- $kept := list }}
{{- range $receiver := $config.receivers }}
{{- if has (first (splitList "-" $receiver.name)) (append $asked "null") }}
{{- range $team := ternary $values.teams (list "") (contains "TEAM" $receiver.name) }}
{{- $one := toJson $receiver | replace "TEAM" $team | fromJson }}
{{- if not $values.email.passwordSecret }}
{{- range concat (default list $one.emailConfigs) (default list $one.email_configs) }}
{{- $_ := unset . "authUsername" }}{{ $_ = unset . "authPassword" }}
{{- $_ = unset . "auth_username" }}{{ $_ = unset . "auth_password_file" }}
{{- end }}
{{- end }}
{{- $receivers = append $receivers $one }}
{{- $kept = append $kept $one.name }}
{{- end }}
{{- end }}
{{- end }}
{{- $_ := set $config "receivers" $receivers }}
{{- $_ := set $config "route" (include "flopwatch.routes" (list (list $config.route) $values.teams $kept) | fromJsonArray | first) }}
{{- toJson $config }}
{{- end }}

{{- /* Routes with those of a team once for each, and without those whose receiver is not there, as JSON. Takes a list: the
routes, the teams, the names of the receivers. */}}
{{- define "flopwatch.routes" -}}
{{- $teams := index . 1 }}
{{- $kept := index . 2 }}
{{- $made := list }}
{{- range $route := index . 0 }}
{{- range $team := ternary $teams (list "") (contains "TEAM" $route.receiver) }}
{{- $one := toJson $route | replace "TEAM" (default "TEAM" $team) | fromJson }}
{{- with $one.routes }}
{{- $_ := set $one "routes" (include "flopwatch.routes" (list . $teams $kept) | fromJsonArray) }}
{{- end }}
{{- if has $one.receiver $kept }}
{{- $made = append $made $one }}
{{- else if $one.routes }}
{{- $made = append $made (set $one "receiver" "null") }}
{{- end }}
{{- end }}
{{- end }}
{{- toJson $made }}
{{- end }}
