{{- define "pipetransformer.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else if not (regexMatch "^[a-z][-a-z0-9]*$" .Release.Name) -}}
{{- fail (printf "release name %s: must begin with a letter and contain no dot, because a Service is named after it" .Release.Name) -}}
{{- else if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 53 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 53 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "pipetransformer.selectorLabels" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
{{- end -}}

{{- define "pipetransformer.testLabels" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: test
{{- end -}}

{{- define "pipetransformer.labels" -}}
{{ include "pipetransformer.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "pipetransformer.serviceAccountName" -}}
{{- .Values.serviceAccount.name | default (include "pipetransformer.fullname" .) -}}
{{- end -}}

{{/* The name contains the value, because the value of a PriorityClass cannot be changed. */}}
{{- define "pipetransformer.priorityClass" -}}
{{- $name := last . -}}
{{- with first . -}}
{{ include "pipetransformer.fullname" . }}-{{ $name }}-{{ int (index .Values.priorityClasses $name) }}
{{- end -}}
{{- end -}}

{{/* Meets the restricted Pod Security Standard. */}}
{{- define "pipetransformer.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{- define "pipetransformer.image" -}}
{{- with .Values.image -}}
{{- if .digest -}}{{ .repository }}@{{ .digest }}{{- else -}}{{ .repository }}:{{ .tag | default $.Chart.AppVersion }}{{- end -}}
{{- end -}}
{{- end -}}

{{/* Fails before anything is installed if the Prometheus Operator is missing. */}}
{{- define "pipetransformer.requireMonitoring" -}}
{{- if not (.root.Capabilities.APIVersions.Has (printf "monitoring.coreos.com/v1/%s" .kind)) -}}
{{- fail (printf "monitoring.%s.enabled: the cluster has no kind %s. Install the CustomResourceDefinitions of the Prometheus Operator first, or leave it disabled (helm template: --api-versions monitoring.coreos.com/v1/%s)" .value .kind .kind) -}}
{{- end -}}
{{- end -}}
