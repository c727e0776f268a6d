{{- define "flopwatch.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- /* Room is left for "-exporter" and for the suffix that StatefulSets give their pods' labels. A release may have dots
in its name, a Service may not. */}}
{{- define "flopwatch.fullname" -}}
{{- $name := include "flopwatch.name" . }}
{{- $full := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) }}
{{- default $full .Values.fullnameOverride | replace "." "-" | trunc 43 | trimSuffix "-" }}
{{- end }}

{{- define "flopwatch.namespace" -}}
{{- default .Release.Namespace .Values.namespaceOverride }}
{{- end }}

{{- /* Metadata of an object. Takes a list: the root, the end of its name, and its component or "". */}}
{{- define "flopwatch.metadata" -}}
{{- $root := index . 0 -}}
name: {{ include "flopwatch.fullname" $root }}{{ index . 1 }}
{{- with $root.Values.namespaceOverride }}
namespace: {{ . }}
{{- end }}
labels:
  {{- include "flopwatch.labels" $root | nindent 2 }}
  {{- with index . 2 }}
  app.kubernetes.io/component: {{ . }}
  {{- end }}
{{- end }}

{{- /* Of what belongs to no namespace: two releases of one name must not fight over it. */}}
{{- define "flopwatch.clusterName" -}}
{{- printf "%s-%s-exporter" (include "flopwatch.namespace" .) (include "flopwatch.fullname" .) }}
{{- end }}

{{- /* The same of what `helm test` alone makes, after the name. */}}
{{- define "flopwatch.testMetadata" -}}
labels:
  {{- include "flopwatch.labels" . | nindent 2 }}
  app.kubernetes.io/component: test
annotations:
  helm.sh/hook: test
  helm.sh/hook-weight: "-1"
  helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded
{{- with .Values.namespaceOverride }}
namespace: {{ . }}
{{- end }}
{{- end }}

{{- define "flopwatch.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
app.kubernetes.io/name: {{ include "flopwatch.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- /* Takes a list: the root, and the component, exporter or ledger. */}}
{{- define "flopwatch.selectorLabels" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: {{ include "flopwatch.name" $root }}
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{- define "flopwatch.serviceAccountName" -}}
{{- default (ternary (include "flopwatch.fullname" .) "default" .Values.serviceAccount.create) .Values.serviceAccount.name }}
{{- end }}

{{- /* The exporter's account is its own, because what it may do (nodes, privileged containers) nothing else needs. */}}
{{- define "flopwatch.exporterAccountName" -}}
{{- include "flopwatch.serviceAccountName" . }}{{ ternary "-exporter" "" .Values.serviceAccount.create }}
{{- end }}

{{- define "flopwatch.image" -}}
{{- $digest := ternary (printf "@%s" .Values.image.digest) "" (ne .Values.image.digest "") }}
{{- printf "%s:%s%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag) $digest | quote }}
{{- end }}

{{- /* Labels of a pod. Takes a list: the root, the component, and the labels of its values. */}}
{{- define "flopwatch.podLabels" -}}
{{- $root := index . 0 -}}
{{- include "flopwatch.selectorLabels" (list $root (index . 1)) }}
{{- with merge (deepCopy (index . 2)) $root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- /* A duration of the values, 500ms or 15s, in milliseconds. */}}
{{- define "flopwatch.milliseconds" -}}
{{- mul (regexFind "^[0-9]+" .) (get (dict "ms" 1 "s" 1000 "m" 60000 "h" 3600000) (regexFind "[a-z]+$" .)) }}
{{- end }}

{{- /* Values that need an exporter of user 0, as JSON. The kubelet's socket, and a state folder on the node, belong to root,
and a capability has no effect for another user. Xids of the kernel log would be counted twice without a state folder. */}}
{{- define "flopwatch.rootValues" -}}
{{- $values := list }}
{{- if not .Values.exporter.simulate }}
{{- range $name := list "kernelLog" "podResources" "statePath" "sysAdmin" }}
{{- if index $.Values.exporter $name }}
{{- $values = append $values (printf "exporter.%s" $name) }}
{{- end }}
{{- end }}
{{- end }}
{{- toJson $values }}
{{- end }}

{{- /* Folder on the node for the exporter's state. Two releases on a node must not share it. */}}
{{- define "flopwatch.statePath" -}}
{{- default (printf "/var/lib/flopwatch/%s-%s" (include "flopwatch.namespace" .) (include "flopwatch.fullname" .)) .Values.exporter.statePath }}
{{- end }}

{{- /* Without its runtime class no exporter would start, and Helm would report the install as a success. The class can be
looked up only with access to a cluster, which always has the namespace kube-system. */}}
{{- define "flopwatch.checkRuntimeClass" -}}
{{- $name := .Values.exporter.runtimeClassName }}
{{- if and .Values.lookup $name (not .Values.exporter.simulate) }}
{{- if and (lookup "v1" "Namespace" "" "kube-system") (not (lookup "node.k8s.io/v1" "RuntimeClass" "" $name)) }}
{{- fail (printf "this cluster has no RuntimeClass %s, so no exporter could start. Install NVIDIA's GPU operator first, set exporter.runtimeClassName to the cluster's class, or set it to \"\" where NVIDIA's runtime is the default. lookup=false skips this check" $name) }}
{{- end }}
{{- end }}
{{- end }}

{{- /* Secret with the token of training processes, "" if they need none. */}}
{{- define "flopwatch.otlpSecret" -}}
{{- if .Values.otlp.requireToken -}}
{{- default (printf "%s-otlp" (include "flopwatch.fullname" .)) .Values.otlp.tokenSecret }}
{{- end }}
{{- end }}

{{- /* Peers that may scrape, as JSON, and their origin. Without given ones they are the namespaces of the cluster's
Prometheus objects. Where these cannot be looked up, every pod may scrape. */}}
{{- define "flopwatch.scrapers" -}}
{{- $peers := .Values.networkPolicy.prometheus }}
{{- $from := "networkPolicy.prometheus" }}
{{- if not $peers }}
{{- $kinds := list }}
{{- if and .Values.lookup (eq .Values.monitor.kind "podmonitor") }}
{{- $kinds = list "monitoring.coreos.com/v1/Prometheus" "monitoring.coreos.com/v1alpha1/PrometheusAgent" }}
{{- else if and .Values.lookup (eq .Values.monitor.kind "vmpodscrape") }}
{{- $kinds = list "operator.victoriametrics.com/v1beta1/VMAgent" "operator.victoriametrics.com/v1beta1/VMSingle" }}
{{- end }}
{{- $spaces := list }}
{{- range $kind := $kinds }}
{{- if $.Capabilities.APIVersions.Has $kind }}
{{- range (lookup (dir $kind) (base $kind) "" "").items }}
{{- $spaces = append $spaces .metadata.namespace }}
{{- end }}
{{- end }}
{{- end }}
{{- range $space := $spaces | uniq | sortAlpha }}
{{- $peers = append $peers (dict "namespaceSelector" (dict "matchLabels" (dict "kubernetes.io/metadata.name" $space))) }}
{{- end }}
{{- $from = printf "namespaces with a Prometheus: %s" ($spaces | uniq | sortAlpha | join ", ") }}
{{- if not $peers }}
{{- $peers = list (dict "namespaceSelector" dict) }}
{{- $from = "every pod of the cluster, because no Prometheus could be looked up. Set networkPolicy.prometheus" }}
{{- end }}
{{- end }}
{{- dict "peers" $peers "from" $from | toJson }}
{{- end }}

{{- define "flopwatch.ledgerSecret" -}}
{{- default (printf "%s-ledger" (include "flopwatch.fullname" .)) .Values.ledger.tokenSecret }}
{{- end }}

{{- /* Not empty if the exporters show a token to the ledger; one elsewhere takes no records without. */}}
{{- define "flopwatch.ledgerToken" -}}
{{- if or .Values.ledger.enabled .Values.ledger.tokenSecret -}}
true
{{- else if hasPrefix "http" .Values.ledger.url -}}
{{- fail "ledger.url needs ledger.tokenSecret: the Secret whose key token that ledger asks for" -}}
{{- end }}
{{- end }}

{{- define "flopwatch.ledgerUrl" -}}
{{- if .Values.ledger.enabled -}}
{{ ternary "http" "https" (empty .Values.ledger.tlsSecret) }}://{{ include "flopwatch.fullname" . }}-ledger:{{ .Values.ledger.port }}
{{- else if and .Values.ledger.tlsSecret (not (hasPrefix "https://" .Values.ledger.url)) -}}
{{- fail "ledger.tlsSecret is for a ledger behind TLS: write ledger.url as https://HOST:PORT" -}}
{{- else -}}
{{ .Values.ledger.url }}
{{- end }}
{{- end }}

{{- /* What a container that reads no device needs: nothing. */}}
{{- define "flopwatch.unprivileged" -}}
allowPrivilegeEscalation: false
capabilities:
  drop: [ALL]
readOnlyRootFilesystem: true
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- /* A probe. Takes a list: the path, whether it is behind TLS, and what the values set. */}}
{{- define "flopwatch.probe" -}}
{{- $probe := dict "httpGet" (dict "path" (index . 0) "port" "metrics") "timeoutSeconds" 5 }}
{{- if index . 1 }}
{{- $_ := set $probe.httpGet "scheme" "HTTPS" }}
{{- end }}
{{- toYaml (mergeOverwrite $probe (deepCopy (index . 2))) }}
{{- end }}

{{- /* What the exporters' pods ask of their namespace's Pod Security, as a list: the level, and why. */}}
{{- define "flopwatch.podSecurity" -}}
{{- $why := list }}
{{- if not .Values.exporter.simulate }}
{{- if .Values.exporter.kernelLog }}
{{- $why = append $why "the privileged container kmsg" }}
{{- end }}
{{- if .Values.exporter.hostPID }}
{{- $why = append $why "hostPID" }}
{{- end }}
{{- $host := or .Values.exporter.sysfs (.Values.exporter.extraVolumes | toJson | contains "hostPath") (ne (include "flopwatch.rootValues" .) "[]") }}
{{- $host = or $host .Values.exporter.jobMapping .Values.exporter.inspector .Values.exporter.devicesAsMounts (contains ":" .Values.exporter.topology) }}
{{- if $host }}
{{- $why = append $why "folders of the node" }}
{{- end }}
{{- if .Values.exporter.sysAdmin }}
{{- $why = append $why "CAP_SYS_ADMIN" }}
{{- end }}
{{- end }}
{{- if .Values.exporter.hostNetwork }}
{{- $why = append $why "hostNetwork" }}
{{- else if or .Values.exporter.hostPort .Values.otlp.hostPort }}
{{- $why = append $why "a port of the node" }}
{{- end }}
{{- toJson (list (ternary "privileged" "restricted" (gt (len $why) 0)) (join ", " $why)) }}
{{- end }}

{{- /* Labels of an object that the Prometheus Operator selects by labels, as JSON: the labels, their origin, and the
selecting objects that read their own namespace only. Given labels take precedence. Otherwise the labels are those that
the selectors in the cluster ask for. Without access to a cluster (`helm template`, Argo CD) they are the fallback.
Takes a list: the root, the given labels, the kind of the selecting object, the field with its selector, the fallback. */}}
{{- define "flopwatch.selected" -}}
{{- $root := index . 0 }}
{{- $kind := index . 2 }}
{{- $field := index . 3 }}
{{- $labels := index . 1 }}
{{- $from := list "given" }}
{{- $elsewhere := list }}
{{- if not $labels }}
{{- $labels = dict }}
{{- $from = list }}
{{- if and $root.Values.lookup ($root.Capabilities.APIVersions.Has (printf "monitoring.coreos.com/v1/%s" $kind)) }}
{{- range (lookup "monitoring.coreos.com/v1" $kind "" "").items }}
{{- $name := printf "%s %s/%s" $kind .metadata.namespace .metadata.name }}
{{- $selector := index .spec $field }}
{{- if kindIs "map" $selector }}
{{- $from = append $from $name }}
{{- $labels = merge $labels (default dict $selector.matchLabels) }}
{{- range $selector.matchExpressions }}
{{- if eq .operator "In" }}
{{- $labels = merge $labels (dict .key (first .values)) }}
{{- end }}
{{- end }}
{{- $spaces := index .spec (replace "Selector" "NamespaceSelector" $field) }}
{{- if and (not (kindIs "map" $spaces)) (ne .metadata.namespace (include "flopwatch.namespace" $root)) }}
{{- $elsewhere = append $elsewhere $name }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- if not $from }}
{{- $labels = index . 4 }}
{{- $from = list "a guess: nothing could be looked up" }}
{{- end }}
{{- end }}
{{- dict "labels" $labels "from" (join ", " $from) "elsewhere" (join ", " $elsewhere) | toJson }}
{{- end }}

{{- define "flopwatch.monitorSelected" -}}
{{- $last := ternary (dict "release" "kube-prometheus-stack") dict (eq .Values.monitor.kind "podmonitor") }}
{{- include "flopwatch.selected" (list . .Values.monitor.labels (ternary "Prometheus" "" (eq .Values.monitor.kind "podmonitor")) "podMonitorSelector" $last) }}
{{- end }}

{{- define "flopwatch.rulesSelected" -}}
{{- $last := ternary (dict "release" "kube-prometheus-stack") dict (eq .Values.rules.kind "prometheusrule") }}
{{- include "flopwatch.selected" (list . .Values.rules.labels (ternary "Prometheus" "" (eq .Values.rules.kind "prometheusrule")) "ruleSelector" $last) }}
{{- end }}

{{- define "flopwatch.routingSelected" -}}
{{- include "flopwatch.selected" (list . .Values.routing.labels "Alertmanager" "alertmanagerConfigSelector" dict) }}
{{- end }}

{{- /* What a pod is scraped by where Prometheus goes by annotations; takes a list: the root, the annotations given, the
port, whether it is behind TLS. */}}
{{- define "flopwatch.podAnnotations" -}}
{{- $root := index . 0 }}
{{- $annotations := index . 1 }}
{{- if eq $root.Values.monitor.kind "annotations" }}
{{- $annotations = merge (deepCopy $annotations) (dict "prometheus.io/scrape" "true" "prometheus.io/path" "/metrics" "prometheus.io/port" (toString (index . 2))) }}
{{- if index . 3 }}
{{- $_ := set $annotations "prometheus.io/scheme" "https" }}
{{- end }}
{{- end }}
{{- with $annotations }}
{{- toYaml . }}
{{- end }}
{{- end }}

{{- /* The PodMonitor or VMPodScrape of a component: takes a list of the root, the component, the discovered names that
become labels, and the Secret with the CA if it is behind TLS. */}}
{{- define "flopwatch.podScrape" -}}
{{- $root := index . 0 }}
{{- $component := index . 1 }}
{{- $monitor := $root.Values.monitor }}
{{- $victoria := eq $monitor.kind "vmpodscrape" -}}
{{- if gt (include "flopwatch.milliseconds" $monitor.scrapeTimeout | int) (include "flopwatch.milliseconds" $monitor.interval | int) }}
{{- fail (printf "monitor.scrapeTimeout (%s) is longer than monitor.interval (%s), which Prometheus refuses" $monitor.scrapeTimeout $monitor.interval) }}
{{- end -}}
apiVersion: {{ ternary "operator.victoriametrics.com/v1beta1" "monitoring.coreos.com/v1" $victoria }}
kind: {{ ternary "VMPodScrape" "PodMonitor" $victoria }}
metadata:
  {{- include "flopwatch.metadata" (list $root (printf "-%s" $component) $component) | nindent 2 }}
    {{- with (include "flopwatch.monitorSelected" $root | fromJson).labels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  jobLabel: app.kubernetes.io/name
  selector:
    matchLabels:
      {{- include "flopwatch.selectorLabels" (list $root $component) | nindent 6 }}
  podMetricsEndpoints:
    - port: metrics
      interval: {{ ternary $monitor.ledgerInterval $monitor.interval (eq $component "ledger") }}
      scrapeTimeout: {{ ternary $monitor.ledgerInterval $monitor.scrapeTimeout (eq $component "ledger") }}
      # A Prometheus that gives its targets a label named host, run or tenant must not rename ours to exported_host.
      honorLabels: true
      {{- with index . 3 }}
      scheme: https
      tlsConfig:
        ca:
          secret: {name: {{ . }}, key: ca.crt}
        serverName: {{ include "flopwatch.fullname" $root }}-{{ $component }}
      {{- end }}
      {{ ternary "relabelConfigs" "relabelings" $victoria }}:
        {{- /* With the operator's defaults written out, or Argo CD and kubectl diff see a change in each sync. */}}
        {{- range $label := index . 2 }}
        - action: replace
          sourceLabels: [{{ $label.from }}]
          targetLabel: {{ $label.to }}
        {{- end }}
        - action: labeldrop
          regex: pod|container|endpoint
      {{- with $monitor.metricRelabelings }}
      {{ ternary "metricRelabelConfigs" "metricRelabelings" $victoria }}:
        {{- toYaml . | nindent 8 }}
      {{- end }}
{{- end }}

{{- /* Names of the rule files: those of rules.tiers, and "dcgm" next to "host", which makes the series that it reads. As
JSON. */}}
{{- define "flopwatch.ruleFiles" -}}
{{- $files := .Values.rules.tiers }}
{{- if and .Values.rules.dcgm (has "host" $files) }}
{{- $files = append $files "dcgm" }}
{{- end }}
{{- toJson $files }}
{{- end }}

{{- /* The rules of some files, as text; alertLabels, and the namespace that an AlertmanagerConfig asks for, are on every
alert, and not on the series of "dcgm". Takes a list: the root, and names of files. */}}
{{- define "flopwatch.rules" -}}
{{- $tiers := without (index . 1) "dcgm" }}
{{- $dcgm := has "dcgm" (index . 1) }}
{{- with index . 0 }}
{{- /* .Files.Get, because the alerts' own templates are Prometheus' business, not Helm's. */}}
{{- $rules := "groups:\n" }}
{{- range $tier := $tiers }}
{{- $rules = printf "%s%s" $rules (regexReplaceAll "(?s)^.*?groups:\n" ((index $ 0).Files.Get (printf "files/rules/%s.yaml" $tier)) "") }}
{{- end }}
{{- if not .Values.rules.keepFiringFor }}
{{- $rules = regexReplaceAll "\n *keep_firing_for: .*" $rules "" }}
{{- end }}
{{- with .Values.rules.runbookUrl }}
{{- $rules = replace "runbook_url: alerts/runbooks/" (printf "runbook_url: %s/" .) $rules }}
{{- end }}
{{- with .Values.rules.dashboardUrl }}
{{- $rules = replace "dashboard_url: /d/" (printf "dashboard_url: %s/d/" .) $rules }}
{{- end }}
{{- $labels := deepCopy .Values.rules.alertLabels }}
{{- if eq .Values.routing.kind "alertmanagerconfig" }}
{{- $labels = merge (dict "namespace" (include "flopwatch.namespace" .)) $labels }}
{{- end }}
{{- with $labels }}
{{- $rules = replace "\n    labels:\n" (printf "\n    labels:\n%s\n" (toYaml . | indent 6)) $rules }}
{{- end }}
{{- if $dcgm }}
{{- $rules = printf "%s%s" $rules (regexReplaceAll "(?s)^.*?groups:\n" (.Files.Get "files/optional/dcgm.yaml") "") }}
{{- end }}
{{- $rules }}
{{- end }}
{{- end }}

{{- /* Where exporters run, as JSON: what the values say, and not where the GPU operator has taken its node label back. The
two ways to meet that are a term each, as terms are alternatives, and so are those of the values. */}}
{{- define "flopwatch.exporterAffinity" -}}
{{- $affinity := deepCopy .Values.exporter.affinity }}
{{- $label := .Values.exporter.gpuOperatorLabel }}
{{- if and $label (not .Values.exporter.simulate) }}
{{- $node := default dict $affinity.nodeAffinity }}
{{- $required := default dict $node.requiredDuringSchedulingIgnoredDuringExecution }}
{{- $terms := list }}
{{- range $term := default (list dict) $required.nodeSelectorTerms }}
{{- range $match := list (dict "key" $label "operator" "In" "values" (list "true")) (dict "key" $label "operator" "DoesNotExist") }}
{{- $terms = append $terms (set (deepCopy $term) "matchExpressions" (append (default list $term.matchExpressions) $match)) }}
{{- end }}
{{- end }}
{{- $_ := set $node "requiredDuringSchedulingIgnoredDuringExecution" (dict "nodeSelectorTerms" $terms) }}
{{- $_ := set $affinity "nodeAffinity" $node }}
{{- end }}
{{- toJson $affinity }}
{{- end }}

{{- /* Secret with the web configuration of the boards and its certificates. */}}
{{- define "flopwatch.boardsSecret" -}}
{{- required "boards.enabled needs boards.webConfigSecret: a Secret whose key web-config.yml lists the users of the boards" .Values.boards.webConfigSecret }}
{{- end }}
