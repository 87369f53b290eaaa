{{/* Names. Pods of a StatefulSet carry its name in a label of at most 63 characters, with a hash behind it. */}}
{{- define "trunkline.fullname" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 24 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 24 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "trunkline.router" -}}{{ include "trunkline.fullname" . }}-router{{- end -}}
{{- define "trunkline.redis" -}}{{ include "trunkline.fullname" . }}-redis{{- end -}}

{{/* Takes a dict of root and part; part is router, redis or worker-POOL. */}}
{{- define "trunkline.selector" -}}
app.kubernetes.io/name: {{ .root.Chart.Name }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .part }}
{{- end -}}

{{- define "trunkline.labels" -}}
{{ include "trunkline.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end -}}

{{/* Takes a dict of root and image. */}}
{{- define "trunkline.image" -}}
{{- with .root.Values.image.registry }}{{ . }}/{{ end }}{{ .image }}:{{ .root.Values.image.tag | default .root.Chart.AppVersion }}
{{- end -}}

{{/* A pool with the defaults beneath it, as JSON. Takes a dict of root and pool (its name). */}}
{{- define "trunkline.pool" -}}
{{- $given := index .root.Values.workers .pool -}}
{{- mergeOverwrite (deepCopy .root.Values.workerDefaults) $given | toJson -}}
{{- end -}}

{{/* Pods trust nobody with more than they need, and are not told of services in variables: a Service named like a
setting would be taken for one. */}}
{{- define "trunkline.pod" -}}
serviceAccountName: {{ include "trunkline.serviceAccount" . }}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with .Values.image.pullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "trunkline.serviceAccount" -}}
{{- $otherwise := ternary (include "trunkline.fullname" .) "default" .Values.serviceAccount.create -}}
{{- .Values.serviceAccount.name | default $otherwise -}}
{{- end -}}

{{- define "trunkline.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "trunkline.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{/* Where pods go, and before whom. Takes the values of a part. */}}
{{- define "trunkline.placement" -}}
{{- with .priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* How pods of a part spread. A constraint without a selector would count no pods at all: it gets the part's own.
Takes a dict of root, part and constraints. */}}
{{- define "trunkline.spread" -}}
{{- $own := dict "matchLabels" (include "trunkline.selector" . | fromYaml) -}}
{{- $made := list -}}
{{- range .constraints -}}
{{- $made = append $made (ternary . (set (deepCopy .) "labelSelector" $own) (hasKey . "labelSelector")) -}}
{{- end -}}
{{- with $made -}}
topologySpreadConstraints: {{- toYaml . | nindent 2 }}
{{- end -}}
{{- end -}}

{{/* A budget of disruptions. A pod that is not ready serves nobody, so it never holds up a node that is to be emptied.
Takes a dict of root, part, name and budget. */}}
{{- define "trunkline.disruptionBudget" -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ .name }}
  labels: {{- include "trunkline.labels" . | nindent 4 }}
spec:
  maxUnavailable: {{ .budget.maxUnavailable }}
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels: {{- include "trunkline.selector" . | nindent 6 }}
{{- end -}}

{{/* Readiness decides about traffic, liveness about the process: a drained worker is alive. Takes the port. */}}
{{- define "trunkline.probes" -}}
readinessProbe:
  grpc:
    port: {{ . }}
    service: readiness
  periodSeconds: 5
  timeoutSeconds: 3
livenessProbe:
  grpc:
    port: {{ . }}
    service: liveness
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 3
{{- end -}}

{{/* Nothing is kept: all of it expires, and routers write it anew. Full, it refuses to write, and routers count by
themselves until there is room: evicting would give tenants their quotas back in silence. Takes the values of Redis. */}}
{{- define "trunkline.redisConfig" -}}
port {{ .port }}
save ""
appendonly no
maxmemory {{ .maxMemory }}
maxmemory-policy noeviction
{{ end -}}

{{/* Where the password of the chart's own Redis is. */}}
{{- define "trunkline.redisPassword" -}}
{{- $given := .Values.redis.existingSecret -}}
secretKeyRef:
  name: {{ $given.name | default (include "trunkline.redis" .) }}
  key: {{ ternary $given.key "password" (not (empty $given.name)) }}
{{- end -}}

{{/* Fails where several routers would each count a tenant's quotas alone, so that it got them as often as there are
routers: a process of them is one. A pod whose processes are told of no Redis would not even start. */}}
{{- define "trunkline.quotasNeedRedis" -}}
{{- $router := .Values.router -}}
{{- $external := .Values.redis.external -}}
{{- $redis := or .Values.redis.enabled $external.url $external.existingSecret.name -}}
{{- range $router.env }}{{ if eq .name "TRUNKLINE_REDIS_URL" }}{{ $redis = true }}{{ end }}{{ end -}}
{{- $routers := mul $router.replicas ($router.config.processes | default 1) -}}
{{- if and (not $redis) (gt $routers 1) -}}
{{- range $tenant := keys $router.tenants | sortAlpha -}}
{{- range $quota := list "requests_per_minute" "tokens_per_minute" "tokens_in_flight" -}}
{{- if hasKey (index $router.tenants $tenant) $quota -}}
{{- $why := printf "%d routers (replicas x config.processes) would each count it alone" $routers -}}
{{- fail (printf "router.tenants: %s of %q: %s: set redis.enabled or redis.external" $quota $tenant $why) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The variable with the URL of Redis, where there is one. */}}
{{- define "trunkline.redisUrl" -}}
{{- $external := .Values.redis.external -}}
{{- if and .Values.redis.enabled (or $external.url $external.existingSecret.name) -}}
{{- fail "redis.external is set: set redis.enabled to false too, or routers would have two" -}}
{{- end -}}
{{- if and .Values.redis.password .Values.redis.existingSecret.name -}}
{{- fail "redis.password and redis.existingSecret are both set: one of them holds the password" -}}
{{- end -}}
{{- if and (not .Values.redis.enabled) (or .Values.redis.password .Values.redis.existingSecret.name) -}}
{{- fail "redis.password and redis.existingSecret are of the chart's own Redis; the URL of another one holds its own" -}}
{{- end -}}
{{- if $external.existingSecret.name }}
- name: TRUNKLINE_REDIS_URL
  valueFrom:
    secretKeyRef:
      name: {{ $external.existingSecret.name }}
      key: {{ $external.existingSecret.key }}
{{- else if $external.url }}
- name: TRUNKLINE_REDIS_URL
  value: {{ $external.url | quote }}
{{- else if .Values.redis.enabled }}
- name: REDIS_PASSWORD
  valueFrom: {{- include "trunkline.redisPassword" . | nindent 4 }}
- name: TRUNKLINE_REDIS_URL
  value: redis://:$(REDIS_PASSWORD)@{{ include "trunkline.redis" . }}:{{ .Values.redis.port }}/0
{{- end }}
{{- end -}}
