{{/*
The objects of a component: ServiceAccount, Deployment, Service and PodDisruptionBudget.

  root       the chart's root
  component  its name, and that of its section in the values
  env        its own settings
  token      whether it uses the API server
  recreate   whether the old pod must be gone before the new one starts
  preStop    seconds that a pod continues after it was told to end, until others send it nothing more
  mounts, volumes, init, annotations, databaseUrl   YAML to add
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
      annotations: {{- merge (dict) $values.podAnnotations (.annotations | default dict) (include "motet.evictable" "data,tmp" | fromYaml) | toYaml | nindent 8 }}
    spec:
      serviceAccountName: {{ $name }}
      automountServiceAccountToken: {{ .token | default false }}
      # Otherwise Kubernetes sets variables such as MOTET_GATEWAY_PORT=tcp://…, which are names of settings.
      enableServiceLinks: false
      securityContext: {{- toYaml $root.Values.securityContext.pod | nindent 8 }}
      terminationGracePeriodSeconds: {{ $values.terminationGracePeriodSeconds }}
      {{- with include "motet.pullSecrets" $root }}{{- . | nindent 6 }}{{- end }}
      {{- with $values.priorityClassName }}
      priorityClassName: {{ . }}
      {{- end }}
      {{- with include "motet.nodeSelector" . | fromYaml }}
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
          securityContext: {{- toYaml $root.Values.securityContext.container | nindent 12 }}
          env:
            {{- include "motet.env" . | nindent 12 }}
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
            {{- with $values.extraVolumeMounts }}{{- toYaml . | nindent 12 }}{{- end }}
        {{- with $values.sidecars }}{{- toYaml . | nindent 8 }}{{- end }}
      volumes:
        - name: data
          emptyDir: {}
        - name: tmp
          emptyDir: {}
        {{- include "motet.tlsVolume" . | trim | nindent 8 }}
        {{- with .volumes }}{{- . | nindent 8 }}{{- end }}
        {{- with $values.extraVolumes }}{{- toYaml . | nindent 8 }}{{- end }}
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
  # Headless: streams stay open for long, so each client chooses a pod, and notices when the pod is gone.
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
# A Service of its own: a load balancer for the Service above must not make the metrics public.
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
  # A pod that is not ready must not block the drain of a node.
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels: {{- include "motet.selector" . | nindent 6 }}
{{- end }}
{{- end -}}

{{- define "motet.portName" -}}
{{- if eq . "gateway" }}http{{ else }}grpc{{ end -}}
{{- end -}}
