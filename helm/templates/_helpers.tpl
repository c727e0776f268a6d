{{- define "flopwatch.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- /* Room is left for "-exporter" and for the suffix that StatefulSets give their pods' labels. */}}
{{- define "flopwatch.fullname" -}}
{{- $name := include "flopwatch.name" . }}
{{- $full := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) }}
{{- default $full .Values.fullnameOverride | trunc 43 | trimSuffix "-" }}
{{- end }}

{{- /* Of what belongs to no namespace: two releases of one name must not fight over it. */}}
{{- define "flopwatch.clusterName" -}}
{{- printf "%s-%s-exporter" .Release.Namespace (include "flopwatch.fullname" .) }}
{{- end }}

{{- define "flopwatch.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
app.kubernetes.io/name: {{ include "flopwatch.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- /* Takes a list: the root, and the component that tells exporter and ledger apart. */}}
{{- define "flopwatch.selectorLabels" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: {{ include "flopwatch.name" $root }}
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{- define "flopwatch.serviceAccountName" -}}
{{- default (ternary (include "flopwatch.fullname" .) "default" .Values.serviceAccount.create) .Values.serviceAccount.name }}
{{- end }}

{{- define "flopwatch.image" -}}
{{- printf "%s:%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag) | quote }}
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
http://{{ include "flopwatch.fullname" . }}-ledger:{{ .Values.ledger.port }}
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

{{- /* Takes the path. */}}
{{- define "flopwatch.probe" -}}
httpGet:
  path: {{ . }}
  port: metrics
timeoutSeconds: 5
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
{{- $why = append $why "folders of the node" }}
{{- end }}
{{- if .Values.otlp.hostPort }}
{{- $why = append $why "a port of the node" }}
{{- end }}
{{- toJson (list (ternary "privileged" "restricted" (gt (len $why) 0)) (join ", " $why)) }}
{{- end }}
