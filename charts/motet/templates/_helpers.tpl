{{- define "motet.fullname" -}}
{{- $name := .Values.fullnameOverride | default .Release.Name -}}
{{- if not (regexMatch "^[a-z]([a-z0-9-]{0,38}[a-z0-9])?$" $name) -}}
{{- fail (printf "%s cannot begin the names of objects: give the release another name, or set fullnameOverride, to at most 40 lower-case letters, digits and hyphens that begin with a letter and do not end with a hyphen" $name) -}}
{{- end -}}
{{- $name -}}
{{- end -}}

{{/* The labels of the objects of a component: (root, component). */}}
{{- define "motet.labels" -}}
app.kubernetes.io/name: motet-{{ .component }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/component: {{ .component }}
app.kubernetes.io/part-of: motet
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
{{- end -}}

{{/* It must never change: Kubernetes does not allow it for a Deployment. */}}
{{- define "motet.selector" -}}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
app.kubernetes.io/part-of: motet
{{- end -}}

{{/* The labels that the operator gives to all runners, of any pool and namespace. */}}
{{- define "motet.runners" -}}
app.kubernetes.io/component: runner
app.kubernetes.io/part-of: motet
{{- end -}}

{{- define "motet.image" -}}
{{- $image := .image | default (index .root.Values .component).image -}}
{{- with .root.Values.image.registry }}{{ . }}/{{ end -}}
{{- $image.repository -}}
{{- if $image.digest -}}
@{{ $image.digest }}
{{- else -}}
{{- $tag := $image.tag | default .root.Values.image.tag | default .root.Chart.AppVersion -}}
{{- if eq $tag "latest" }}{{ fail (printf "the image tag of %s is latest, which does not say what runs: set a version" .component) }}{{ end -}}
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

{{/* The host:port at which other pods reach a component: (root, component). */}}
{{- define "motet.address" -}}
{{ include "motet.fullname" .root }}-{{ .component }}.{{ .root.Release.Namespace }}.svc:{{ include "motet.port" .component }}
{{- end -}}

{{- define "motet.port" -}}
{{- get (dict "gateway" 8000 "scheduler" 7101 "predictor" 7102 "supervisor" 7103 "runner" 7110) . -}}
{{- end -}}

{{/*
Where a process listens: every address of its pod, in IPv4 and IPv6. `kubectl port-forward` connects to the loopback
address, and a Service of two families to both.
*/}}
{{- define "motet.listen" -}}
[::]:{{ . }}
{{- end -}}

{{/*
The cluster autoscaler never removes a node with a pod that has an emptyDir on disk, unless the pod names the volume. All
that Motet has in these can be fetched or learned again.
*/}}
{{- define "motet.evictable" -}}
cluster-autoscaler.kubernetes.io/safe-to-evict-local-volumes: {{ . }}
{{- end -}}

{{/* The labels of the nodes that may run a component, as YAML: (root, component). */}}
{{- define "motet.nodeSelector" -}}
{{- merge (dict) (index .root.Values .component).nodeSelector .root.Values.nodeSelector | toYaml -}}
{{- end -}}

{{/*
The environment of a container: (root, component, env, databaseUrl). The fields of the pod come first, then extraEnv,
because other variables refer to them. Each variable is written once. If several set it, extraEnv of the component wins,
then its env, then the env of all components, then `env`, then `databaseUrl` and what is written here.
*/}}
{{- define "motet.env" -}}
{{- include "motet.refuseVariables" (dict "where" "env" "names" (keys .root.Values.env)) -}}
{{- include "motet.refuseVariables" (dict "where" (printf "%s.env" .component) "names" (keys (index .root.Values .component).env)) -}}
{{- $own := (index .root.Values .component).env -}}
{{- $extra := dict -}}
{{- $common := dict
  "MOTET_DATA_DIR" "/var/lib/motet"
  "MOTET_LOG_LEVEL" .root.Values.logLevel
  "MOTET_METRICS_ADDRESS" (include "motet.listen" 9090)
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
{{- range (index .root.Values .component).extraEnv }}
{{- if hasKey $extra .name }}{{ fail (printf "%s.extraEnv has the variable %s twice: keep one of them" $.component .name) }}{{ end }}
{{- include "motet.refuseVariables" (dict "where" (printf "%s.extraEnv" $.component) "names" (list .name)) }}
{{- $_ := set $extra .name true }}
{{ list . | toYaml }}
{{- end }}
{{- $named := mergeOverwrite $common (.env | default dict) .root.Values.env $own }}
{{- range $name, $value := $named }}
{{- if not (hasKey $extra $name) }}
- name: {{ $name }}
  value: {{ $value | quote }}
{{- end }}
{{- end }}
{{- range .databaseUrl | default "" | fromYamlArray }}
{{- if not (or (hasKey $extra .name) (hasKey $named .name)) }}
{{ list . | toYaml }}
{{- end }}
{{- end }}
{{- end -}}

{{/*
Fails for a variable of which other objects know only from another field: (where, names). If a variable set it as well,
these would not fit the process.
*/}}
{{- define "motet.refuseVariables" -}}
{{- $fields := dict
  "MOTET_CLUSTER_OPERATOR_CLASS" "operator.class"
  "MOTET_CLUSTER_POOL_NAMESPACES" "pools.namespaces"
  "MOTET_GATEWAY_AUTH" "gateway.auth"
  "MOTET_RUNNER_MODEL_DIGEST" "spec.model.digest of each ServingPool"
  "MOTET_RUNNER_MODEL_REVISION" "spec.model.revision of each ServingPool"
-}}
{{- range .names -}}
{{- if hasKey $fields . -}}
{{- fail (printf "%s has the variable %s: remove it there and set %s" $.where . (get $fields .)) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The settings of a container that migrates the database and ends: it serves nothing. */}}
{{- define "motet.migrationEnv" -}}
MOTET_METRICS_ADDRESS: ""
MOTET_TLS_DIR: ""
{{- end -}}

{{- define "motet.tlsVolume" -}}
{{- if .root.Values.tls.enabled }}
- name: tls
  secret:
    secretName: {{ include "motet.fullname" .root }}-{{ .component }}-tls
    # Readable by the pod's group (fsGroup) only.
    defaultMode: 0440
{{- end }}
{{- end -}}

{{- define "motet.tlsMount" -}}
{{- if .root.Values.tls.enabled }}
- {name: tls, mountPath: /etc/motet/tls, readOnly: true}
{{- end }}
{{- end -}}

{{/* The file with the certificates of the ConfigMap that the values call `authorities`. */}}
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

{{/* The Secret with the database's URL, as YAML; empty without a database. */}}
{{- define "motet.databaseSecret" -}}
{{- if .Values.database.existingSecret.name -}}
name: {{ .Values.database.existingSecret.name }}
key: {{ .Values.database.existingSecret.key }}
{{- else if .Values.database.url -}}
name: {{ include "motet.fullname" . }}-database
key: url
{{- end -}}
{{- end -}}

{{/* The Secret with the URL with which gateways read API keys, as YAML. */}}
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

{{/* Where gateways find API keys: secret or database; empty if they ask for none. */}}
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

{{- define "motet.featuresKeySecret" -}}
{{- .Values.gateway.featuresKeySecret | default (printf "%s-features-key" (include "motet.fullname" .)) -}}
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
