{{/*
One of our services: ServiceAccount, Deployment, Service and PodDisruptionBudget.

  root       the chart's root
  component  its name, which is also that of its section in the values
  env        its own settings
  token      whether it speaks with the API server
  recreate   whether the old pod must be gone before the new one starts
  preStop    seconds that a pod waits after it was told to go, until nobody sends it anything
  mounts, volumes, init, annotations, databaseUrl   YAML to add, where a component has more
*/}}
{{- define "motet.component" -}}
{{- $root := .root -}}
{{- $values := index .root.Values .component -}}
{{- $name := printf "%s-%s" (include "motet.fullname" .root) .component -}}
{{- $labels := include "motet.labels" . -}}
{{- $port := include "motet.port" .component -}}
apiVersion: v1
kind: ServiceAccount
metadata:
  name: {{ $name }}
  namespace: {{ $root.Release.Namespace }}
  labels: {{- $labels | nindent 4 }}
  {{- with $values.serviceAccount.annotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
automountServiceAccountToken: false
---
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {{ $name }}
  namespace: {{ $root.Release.Namespace }}
  labels: {{- $labels | nindent 4 }}
spec:
  {{- if not (kindIs "invalid" $values.replicas) }}
  replicas: {{ $values.replicas }}
  {{- end }}
  revisionHistoryLimit: 3
  selector:
    matchLabels: {{- include "motet.selector" . | nindent 6 }}
  strategy:
    {{- if .recreate }}
    type: Recreate
    {{- else }}
    type: RollingUpdate
    rollingUpdate: {maxSurge: 1, maxUnavailable: 0}
    {{- end }}
  template:
    metadata:
      labels: {{- merge (fromYaml $labels) $values.podLabels | toYaml | nindent 8 }}
      {{- with merge (.annotations | default dict) $values.podAnnotations }}
      annotations: {{- toYaml . | nindent 8 }}
      {{- end }}
    spec:
      serviceAccountName: {{ $name }}
      automountServiceAccountToken: {{ .token | default false }}
      # Variables such as MOTET_GATEWAY_PORT=tcp://… would be taken for settings.
      enableServiceLinks: false
      securityContext: {{- include "motet.podSecurity" . | nindent 8 }}
      terminationGracePeriodSeconds: {{ $values.terminationGracePeriodSeconds }}
      {{- with include "motet.pullSecrets" $root }}{{- . | nindent 6 }}{{- end }}
      {{- with $values.priorityClassName }}
      priorityClassName: {{ . }}
      {{- end }}
      {{- with $values.nodeSelector }}
      nodeSelector: {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with $values.tolerations }}
      tolerations: {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with $values.affinity }}
      affinity: {{- toYaml . | nindent 8 }}
      {{- end }}
      topologySpreadConstraints: {{- include "motet.spread" . | trim | nindent 8 }}
      {{- with .init }}
      initContainers: {{- . | nindent 8 }}
      {{- end }}
      containers:
        - name: {{ .component }}
          image: {{ include "motet.image" . }}
          imagePullPolicy: {{ $root.Values.image.pullPolicy }}
          securityContext: {{- include "motet.containerSecurity" . | nindent 12 }}
          env:
            {{- include "motet.env" . | nindent 12 }}
            {{- with .databaseUrl }}{{- . | nindent 12 }}{{- end }}
          ports:
            {{- if $port }}
            - {name: {{ include "motet.portName" .component }}, containerPort: {{ $port }}}
            {{- end }}
            - {name: metrics, containerPort: 9090}
          startupProbe:
            httpGet: {path: /livez, port: metrics}
            periodSeconds: 1
            failureThreshold: 180
          livenessProbe:
            httpGet: {path: /livez, port: metrics}
            periodSeconds: 10
            timeoutSeconds: 5
            failureThreshold: 6
          readinessProbe:
            httpGet: {path: /readyz, port: metrics}
            periodSeconds: 2
            timeoutSeconds: 2
          {{- with .preStop }}
          lifecycle:
            preStop: {sleep: {seconds: {{ . }}}}
          {{- end }}
          resources: {{- toYaml $values.resources | nindent 12 }}
          volumeMounts:
            - {name: data, mountPath: /var/lib/motet}
            - {name: tmp, mountPath: /tmp}
            {{- include "motet.tlsMount" . | trim | nindent 12 }}
            {{- with .mounts }}{{- . | nindent 12 }}{{- end }}
      volumes:
        - name: data
          emptyDir: {}
        - name: tmp
          emptyDir: {}
        {{- include "motet.tlsVolume" . | trim | nindent 8 }}
        {{- with .volumes }}{{- . | nindent 8 }}{{- end }}
---
apiVersion: v1
kind: Service
metadata:
  name: {{ $name }}
  namespace: {{ $root.Release.Namespace }}
  labels: {{- $labels | nindent 4 }}
  {{- with ($values.service).annotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  {{- if $values.service }}
  type: {{ $values.service.type }}
  {{- else }}
  # Streams live long: each client picks a pod when it connects, and knows when that one is gone.
  clusterIP: None
  {{- end }}
  selector: {{- include "motet.selector" . | nindent 4 }}
  ports:
    {{- if $port }}
    - {name: {{ include "motet.portName" .component }}, port: {{ $port }}, targetPort: {{ include "motet.portName" .component }}}
    {{- end }}
    {{- if not $values.service }}
    - {name: metrics, port: 9090, targetPort: metrics}
    {{- end }}
{{- if $values.service }}
---
# Apart, so that a load balancer of the one above cannot show them to the world.
apiVersion: v1
kind: Service
metadata:
  name: {{ $name }}-metrics
  namespace: {{ $root.Release.Namespace }}
  labels: {{- $labels | nindent 4 }}
spec:
  clusterIP: None
  selector: {{- include "motet.selector" . | nindent 4 }}
  ports:
    - {name: metrics, port: 9090, targetPort: metrics}
{{- end }}
{{- $budget := $values.podDisruptionBudget }}
{{- if or (eq $budget.mode "Always") (and (eq $budget.mode "Auto") (or (kindIs "invalid" $values.replicas) (gt (int $values.replicas) 1))) }}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ $name }}
  namespace: {{ $root.Release.Namespace }}
  labels: {{- $labels | nindent 4 }}
spec:
  maxUnavailable: {{ $budget.maxUnavailable }}
  # A pod that does not work must not keep a node from being drained.
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels: {{- include "motet.selector" . | nindent 6 }}
{{- end }}
{{- end -}}

{{- define "motet.portName" -}}
{{- if eq . "gateway" }}http{{ else }}grpc{{ end -}}
{{- end -}}
