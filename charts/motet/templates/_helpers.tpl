{{- define "motet.fullname" -}}
{{- $name := .Values.fullnameOverride | default .Release.Name -}}
{{- if not (regexMatch "^[a-z]([a-z0-9-]{0,38}[a-z0-9])?$" $name) -}}
{{- fail (printf "objects cannot be called %s-gateway and the like: name the release, or set fullnameOverride, with at most 40 lower-case letters, digits and hyphens, beginning with a letter" $name) -}}
{{- end -}}
{{- $name -}}
{{- end -}}

{{/* Of a part of this release: (root, component). */}}
{{- define "motet.labels" -}}
app.kubernetes.io/name: motet-{{ .component }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/component: {{ .component }}
app.kubernetes.io/part-of: motet
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
{{- end -}}

{{/* Never changes: a Deployment's selector cannot. */}}
{{- define "motet.selector" -}}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
app.kubernetes.io/part-of: motet
{{- end -}}

{{/* Every runner, whichever pool of whichever namespace it belongs to; the operator labels them so. */}}
{{- define "motet.runners" -}}
app.kubernetes.io/component: runner
app.kubernetes.io/part-of: motet
{{- end -}}

{{- define "motet.image" -}}
{{- $image := (index .root.Values .component).image -}}
{{- with .root.Values.image.registry }}{{ . }}/{{ end -}}
{{- $image.repository -}}
{{- if $image.digest -}}
@{{ $image.digest }}
{{- else -}}
{{- $tag := $image.tag | default .root.Values.image.tag | default .root.Chart.AppVersion -}}
{{- if eq $tag "latest" }}{{ fail (printf "the image tag of %s is latest, and nobody could say what runs: name a version" .component) }}{{ end -}}
:{{ $tag }}
{{- end -}}
{{- end -}}

{{- define "motet.pullSecrets" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* host:port of one of our services, as other pods dial it: (root, component). */}}
{{- define "motet.address" -}}
{{ include "motet.fullname" .root }}-{{ .component }}.{{ .root.Release.Namespace }}.svc:{{ include "motet.port" .component }}
{{- end -}}

{{- define "motet.port" -}}
{{- get (dict "gateway" 8000 "scheduler" 7101 "predictor" 7102 "supervisor" 7103 "runner" 7110) . -}}
{{- end -}}

{{/* What Pod Security calls restricted. */}}
{{- define "motet.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "motet.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{/*
The environment of a container: (root, component, env). What a pod knows of itself comes first, because the rest refers
to it. Each name is written once, whoever sets it: the user's word for this component, then for all, then ours.
*/}}
{{- define "motet.env" -}}
{{- $own := (index .root.Values .component).env -}}
{{- $common := dict
  "MOTET_DATA_DIR" "/var/lib/motet"
  "MOTET_LOG_LEVEL" .root.Values.logLevel
  "MOTET_METRICS_ADDRESS" "$(POD_IP):9090"
  "MOTET_METRICS_NAMES" (toString .root.Values.metrics.names)
  "MOTET_TLS_DIR" (ternary "/etc/motet/tls" "" .root.Values.tls.enabled)
-}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: POD_NAMESPACE
  valueFrom: {fieldRef: {fieldPath: metadata.namespace}}
- name: POD_UID
  valueFrom: {fieldRef: {fieldPath: metadata.uid}}
{{- range $name, $value := mergeOverwrite $common (.env | default dict) .root.Values.env $own }}
- name: {{ $name }}
  value: {{ $value | quote }}
{{- end }}
{{- end -}}

{{/* Of a container that does one thing to the database and ends. */}}
{{- define "motet.speaksToNobody" -}}
MOTET_METRICS_ADDRESS: ""
MOTET_TLS_DIR: ""
{{- end -}}

{{- define "motet.tlsVolume" -}}
{{- if .root.Values.tls.enabled }}
- name: tls
  secret:
    secretName: {{ include "motet.fullname" .root }}-{{ .component }}-tls
    # The group is the pod's own; nobody else may read the key.
    defaultMode: 0440
{{- end }}
{{- end -}}

{{- define "motet.tlsMount" -}}
{{- if .root.Values.tls.enabled }}
- {name: tls, mountPath: /etc/motet/tls, readOnly: true}
{{- end }}
{{- end -}}

{{/* Of the values' `authorities`: a ConfigMap with certificates to trust, and where they are then. */}}
{{- define "motet.authoritiesFile" -}}
/etc/motet/authorities/ca.crt
{{- end -}}

{{- define "motet.authoritiesMount" -}}
{{- if .configMapName -}}
- {name: authorities, mountPath: {{ dir (include "motet.authoritiesFile" .) }}, readOnly: true}
{{- end -}}
{{- end -}}

{{- define "motet.authoritiesVolume" -}}
{{- if .configMapName -}}
- name: authorities
  configMap:
    name: {{ .configMapName }}
    items: [{key: {{ .key }}, path: {{ base (include "motet.authoritiesFile" .) }}}]
{{- end -}}
{{- end -}}

{{/* Where the database's URL lies, or nothing: the Secret of the release, or (root, hook) the one of its hook. */}}
{{- define "motet.databaseSecret" -}}
{{- if .Values.database.existingSecret.name -}}
name: {{ .Values.database.existingSecret.name }}
key: {{ .Values.database.existingSecret.key }}
{{- else if .Values.database.url -}}
name: {{ include "motet.fullname" . }}-database
key: url
{{- end -}}
{{- end -}}

{{/* Where the URL lies with which gateways read API keys. */}}
{{- define "motet.gatewaysDatabaseSecret" -}}
{{- with .Values.gateway.database.existingSecret -}}
{{- if .name -}}
name: {{ .name }}
key: {{ .key }}
{{- else -}}
{{- include "motet.databaseSecret" $ -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Where gateways look for API keys: secret, database, or nothing when they ask for none. */}}
{{- define "motet.keysAreIn" -}}
{{- if eq .Values.gateway.auth "keys" -}}
{{- if and (include "motet.databaseSecret" .) (not .Values.gateway.keysSecret) -}}
database
{{- else -}}
secret
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "motet.keysSecret" -}}
{{- .Values.gateway.keysSecret | default (printf "%s-keys" (include "motet.fullname" .)) -}}
{{- end -}}

{{- define "motet.spread" -}}
{{- $values := index .root.Values .component -}}
{{- if $values.topologySpreadConstraints }}
{{- toYaml $values.topologySpreadConstraints }}
{{- else }}
{{- range list "topology.kubernetes.io/zone" "kubernetes.io/hostname" }}
- maxSkew: 1
  topologyKey: {{ . }}
  whenUnsatisfiable: ScheduleAnyway
  labelSelector:
    matchLabels: {{- include "motet.selector" $ | nindent 6 }}
  matchLabelKeys: [pod-template-hash]
{{- end }}
{{- end }}
{{- end -}}
