{{- define "pipetransformer.name" -}}
{{- .Values.nameOverride | default .Chart.Name -}}
{{- end -}}

{{- define "pipetransformer.fullname" -}}
{{- $name := include "pipetransformer.name" . -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else if not (regexMatch "^[a-z][-a-z0-9]*$" .Release.Name) -}}
{{- fail (printf "release name %s: must begin with a letter and contain no dot, because a Service is named after it" .Release.Name) -}}
{{- else if contains $name .Release.Name -}}
{{- .Release.Name | trunc 53 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 53 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "pipetransformer.selectorLabels" -}}
app.kubernetes.io/name: {{ include "pipetransformer.name" . | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/component: operator
{{- end -}}

{{- define "pipetransformer.testLabels" -}}
app.kubernetes.io/name: {{ include "pipetransformer.name" . | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/component: test
{{- end -}}

{{- define "pipetransformer.labels" -}}
{{ include "pipetransformer.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "pipetransformer.serviceAccountName" -}}
{{- if not (or .Values.serviceAccount.create .Values.serviceAccount.name) -}}
{{- fail "serviceAccount.create: with false, serviceAccount.name must name a ServiceAccount in the release's namespace" -}}
{{- end -}}
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

{{/* Of pods besides the operator's: its affinity to pods may allow no node to them. */}}
{{- define "pipetransformer.nodeAffinity" -}}
{{- with (.Values.affinity | default dict).nodeAffinity -}}
affinity:
  nodeAffinity:
    {{- toYaml . | nindent 4 }}
{{- end -}}
{{- end -}}

{{- define "pipetransformer.image" -}}
{{- with .Values.image -}}
{{- with .registry -}}{{ . }}/{{- end -}}
{{- if .digest -}}{{ .repository }}@{{ .digest }}{{- else -}}{{ .repository }}:{{ .tag | default $.Chart.AppVersion }}{{- end -}}
{{- end -}}
{{- end -}}

{{/* Fails before anything is installed if the Prometheus Operator is missing. */}}
{{- define "pipetransformer.requireMonitoring" -}}
{{- if not (.root.Capabilities.APIVersions.Has (printf "monitoring.coreos.com/v1/%s" .kind)) -}}
{{- fail (printf "monitoring.%s.enabled: the cluster has no kind %s. Install the CustomResourceDefinitions of the Prometheus Operator first, or leave it disabled (helm template: --api-versions monitoring.coreos.com/v1/%s)" .value .kind .kind) -}}
{{- end -}}
{{- end -}}
