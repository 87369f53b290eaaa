{{/* Names are short: pods of a StatefulSet have a label of at most 63 characters with its name and a hash. */}}
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

{{/* A pool's values merged over the defaults, as JSON. Takes a dict of root and pool (its name). */}}
{{- define "trunkline.pool" -}}
{{- $given := index .root.Values.workers .pool -}}
{{- mergeOverwrite (deepCopy .root.Values.workerDefaults) $given | toJson -}}
{{- end -}}

{{/* Pods have no service account token. They get no service variables, because those of a Service named trunkline would
be read as settings. */}}
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

{{/* Placement and priority of pods. Takes the values of a part. */}}
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

{{/* Spread constraints of a part's pods. A constraint without a selector would not count any pods, so it gets the
selector of the part. Takes a dict of root, part and constraints. */}}
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

{{/* A disruption budget. A pod that is not ready serves no requests, so it must not delay the draining of its node.
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

{{/* Whether routers and workers use TLS: "true" or "". Fails if only one side has a certificate, or if there is none and
plaintext is not permitted. */}}
{{- define "trunkline.tls" -}}
{{- $tls := .Values.tls -}}
{{- if ne (empty $tls.routerSecret) (empty $tls.workerSecret) -}}
{{- fail "tls.routerSecret and tls.workerSecret: set both or none" -}}
{{- end -}}
{{- if $tls.routerSecret -}}
true
{{- else if not .Values.allowPlaintext -}}
{{- fail "tls: set tls.routerSecret and tls.workerSecret, or permit plaintext with allowPlaintext: true" -}}
{{- else if $tls.clientCertificates -}}
{{- fail "tls.clientCertificates needs tls.routerSecret" -}}
{{- end -}}
{{- end -}}

{{/* Fails if the way to Redis would be readable without being permitted. What an existing Secret has as the URL is
checked by the routers themselves. */}}
{{- define "trunkline.redisTlsCheck" -}}
{{- $redis := .Values.redis -}}
{{- if not .Values.allowPlaintext -}}
{{- if and $redis.enabled (not .Values.tls.redisSecret) -}}
{{- fail "redis: set tls.redisSecret, or permit plaintext with allowPlaintext: true" -}}
{{- end -}}
{{- if hasPrefix "redis://" $redis.external.url -}}
{{- fail "redis.external.url: use rediss://, or permit plaintext with allowPlaintext: true" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Fails if any caller could use the routers without being permitted, or if identities lack something. */}}
{{- define "trunkline.identityCheck" -}}
{{- $config := .Values.router.config -}}
{{- $identity := .Values.identity -}}
{{- $environment := dict -}}
{{- range .Values.router.env }}{{ $_ := set $environment .name true }}{{ end -}}
{{- $inRedis := or $config.api_keys_in_redis (hasKey $environment "TRUNKLINE_API_KEYS_IN_REDIS") -}}
{{- $tokens := or $identity.jwks.name $config.jwt_jwks (hasKey $environment "TRUNKLINE_JWT_JWKS") -}}
{{- if not (or .Values.allowAnonymous $inRedis $tokens $identity.apiKeys.name (hasKey $environment "TRUNKLINE_API_KEYS")) -}}
{{- fail "identity: any caller could use the routers: set identity.apiKeys, identity.jwks, api_keys_in_redis or jwt_jwks in router.config, or allowAnonymous: true" -}}
{{- end -}}
{{- $secretInEnv := or (hasKey $environment "TRUNKLINE_FLEET_SECRET") (hasKey $environment "TRUNKLINE_FLEET_SECRET_FILE") -}}
{{- if and $secretInEnv $identity.fleetSecret.name -}}
{{- fail "identity.fleetSecret and a TRUNKLINE_FLEET_SECRET in router.env are both set: one of them is the fleet's secret" -}}
{{- end -}}
{{- if and $inRedis (not $secretInEnv) (not $identity.fleetSecret.name) -}}
{{- fail "router.config.api_keys_in_redis: API keys in Redis are sealed with the fleet's secret: set identity.fleetSecret" -}}
{{- end -}}
{{- if and $identity.jwks.name $config.jwt_jwks -}}
{{- fail "identity.jwks and router.config.jwt_jwks are both set: one of them has the issuer's keys" -}}
{{- end -}}
{{- range $setting := list "jwt_issuer" "jwt_audience" -}}
{{- if and $tokens (not (get $config $setting)) (not (hasKey $environment (printf "TRUNKLINE_%s" (upper $setting)))) -}}
{{- fail (printf "router.config.%s: set it, or tokens for other services would count" $setting) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The mounted files of identities, as JSON: by their setting, each with its volume, source, folder and file. */}}
{{- define "trunkline.identityFiles" -}}
{{- $identity := .Values.identity -}}
{{- $made := dict -}}
{{- with $identity.apiKeys -}}{{- if .name -}}
{{- $made = merge $made (dict "api_keys" (dict "volume" "api-keys" "kind" "secret" "name" .name "key" .key "file" "keys.json")) -}}
{{- end -}}{{- end -}}
{{- with $identity.fleetSecret -}}{{- if .name -}}
{{- $made = merge $made (dict "fleet_secret_file" (dict "volume" "fleet-secret" "kind" "secret" "name" .name "key" .key "file" "secret")) -}}
{{- end -}}{{- end -}}
{{- with $identity.jwks -}}{{- if .name -}}
{{- $made = merge $made (dict "jwt_jwks" (dict "volume" "jwks" "kind" "configMap" "name" .name "key" .key "file" "jwks.json")) -}}
{{- end -}}{{- end -}}
{{- $made | toJson -}}
{{- end -}}

{{/* The settings of a server's own port. Takes the root. */}}
{{- define "trunkline.serverTls" -}}
{{- $made := dict "allow_plaintext" .Values.allowPlaintext -}}
{{- if include "trunkline.tls" . -}}
{{- $made = merge $made (dict "tls_cert" "/etc/trunkline-tls/tls.crt" "tls_key" "/etc/trunkline-tls/tls.key") -}}
{{- end -}}
{{- $made | toJson -}}
{{- end -}}

{{/* The volume of a certificate. The whole directory is mounted: a renewed Secret would not reach a subPath. Takes the
Secret's name. */}}
{{- define "trunkline.tlsVolume" -}}
- name: tls
  secret:
    secretName: {{ . }}
    defaultMode: 0440
{{- end -}}

{{- define "trunkline.tlsMount" -}}
- name: tls
  mountPath: /etc/trunkline-tls
  readOnly: true
{{- end -}}

{{/* Readiness controls traffic, liveness restarts: a drained worker is alive but not ready. Takes the port. */}}
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

{{/* Redis saves nothing, because all data expires and routers rewrite it. When it is full it refuses writes, and each
router counts alone until there is room: eviction would silently reset tenants' quotas. Takes the root. */}}
{{- define "trunkline.redisConfig" -}}
{{- $redis := .Values.redis -}}
{{- if .Values.tls.redisSecret -}}
port 0
tls-port {{ $redis.port }}
tls-cert-file /etc/trunkline-tls/tls.crt
tls-key-file /etc/trunkline-tls/tls.key
tls-ca-cert-file /etc/trunkline-tls/ca.crt
tls-auth-clients no
{{- else -}}
port {{ $redis.port }}
{{- end }}
save ""
appendonly no
maxmemory {{ $redis.maxMemory }}
maxmemory-policy noeviction
{{ end -}}

{{/* Reference to the password of the chart's own Redis. */}}
{{- define "trunkline.redisPassword" -}}
{{- $given := .Values.redis.existingSecret -}}
secretKeyRef:
  name: {{ $given.name | default (include "trunkline.redis" .) }}
  key: {{ ternary $given.key "password" (not (empty $given.name)) }}
{{- end -}}

{{/* The number of processes of a router pod. Settings in the environment replace those in the file. */}}
{{- define "trunkline.processes" -}}
{{- $processes := .Values.router.config.processes | default 1 -}}
{{- range .Values.router.env -}}
{{- if eq .name "TRUNKLINE_PROCESSES" -}}{{- $processes = .value -}}{{- end -}}
{{- end -}}
{{- $processes | int -}}
{{- end -}}

{{/* The ports at which the processes of a router pod serve their metrics, by name; empty if the HTTP port does. */}}
{{- define "trunkline.routerMetricsPorts" -}}
{{- $ports := dict -}}
{{- $processes := include "trunkline.processes" . | int -}}
{{- if gt $processes 1 -}}
{{- range $number := until $processes -}}
{{- $_ := set $ports (printf "metrics-%d" $number) (add (int $.Values.router.processMetricsPort) $number) -}}
{{- end -}}
{{- end -}}
{{- $ports | toJson -}}
{{- end -}}

{{/* Fails if several router processes would each count a tenant's quotas alone, so that the tenant got a multiple of
them. A router pod with several processes, quotas and no Redis would not even start. */}}
{{- define "trunkline.quotasNeedRedis" -}}
{{- $router := .Values.router -}}
{{- $external := .Values.redis.external -}}
{{- $redis := or .Values.redis.enabled $external.url $external.existingSecret.name -}}
{{- range $router.env -}}
{{- if eq .name "TRUNKLINE_REDIS_URL" -}}{{- $redis = true -}}{{- end -}}
{{- end -}}
{{- $routers := mul $router.replicas (include "trunkline.processes" .) -}}
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

{{/* Fails if responses are stored and there are several router processes: each has its own in memory, so a client that
comes through another one would not find them. Settings in the environment replace those in the file; the chart cannot
see what comes by valueFrom. */}}
{{- define "trunkline.responsesNeedOneRouter" -}}
{{- $router := .Values.router -}}
{{- $stored := $router.config.max_stored_responses -}}
{{- range $router.env -}}
{{- if and (hasKey . "valueFrom") (has .name (list "TRUNKLINE_MAX_STORED_RESPONSES" "TRUNKLINE_PROCESSES")) -}}
{{- $why := "it decides whether clients find stored responses, and the chart cannot see what comes by valueFrom" -}}
{{- fail (printf "router.env: %s: %s: set it in router.config or by value" .name $why) -}}
{{- end -}}
{{- if eq .name "TRUNKLINE_MAX_STORED_RESPONSES" -}}{{- $stored = .value -}}{{- end -}}
{{- end -}}
{{- $routers := mul $router.replicas (include "trunkline.processes" .) -}}
{{- if and (gt (int $stored) 0) (gt $routers 1) -}}
{{- $why := printf "of %d routers (replicas x config.processes) only one would have a response" $routers -}}
{{- fail (printf "router.config.max_stored_responses: %s: set replicas and processes to 1, or max_stored_responses to 0" $why) -}}
{{- end -}}
{{- end -}}

{{/* The environment variable with the URL of Redis, if there is one. */}}
{{- define "trunkline.redisUrl" -}}
{{- $external := .Values.redis.external -}}
{{- if and .Values.redis.enabled (or $external.url $external.existingSecret.name) -}}
{{- fail "redis.external is set: also set redis.enabled to false, or routers would have two" -}}
{{- end -}}
{{- if and .Values.redis.password .Values.redis.existingSecret.name -}}
{{- fail "redis.password and redis.existingSecret are both set: one of them holds the password" -}}
{{- end -}}
{{- if and (not .Values.redis.enabled) (or .Values.redis.password .Values.redis.existingSecret.name) -}}
{{- fail "redis.password and redis.existingSecret are for the chart's own Redis; an external one's URL has its own" -}}
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
  value: {{ ternary "rediss" "redis" (not (empty .Values.tls.redisSecret)) }}://:$(REDIS_PASSWORD)@{{ include "trunkline.redis" . }}:{{ .Values.redis.port }}/0
{{- end }}
{{- end -}}

{{/* The settings of workers' metrics. Fails if they could be read by any client without being permitted. Takes the root. */}}
{{- define "trunkline.workerMetrics" -}}
{{- $metrics := .Values.observability.workerMetrics -}}
{{- $made := dict -}}
{{- if $metrics.enabled -}}
{{- $made = dict "metrics_port" $metrics.port -}}
{{- if $metrics.token.name -}}
{{- $_ := set $made "metrics_token_file" "/etc/trunkline-metrics-token/token" -}}
{{- else if or $metrics.anonymous .Values.allowAnonymous -}}
{{- $_ := set $made "metrics_anonymous" true -}}
{{- else -}}
{{- fail "observability.workerMetrics: any client could read the metrics of workers: set token, or anonymous: true" -}}
{{- end -}}
{{- end -}}
{{- $made | toJson -}}
{{- end -}}

{{/* The OTEL_* variables of routers and workers. Takes the root. */}}
{{- define "trunkline.traces" -}}
{{- with .Values.observability.traces -}}
{{- if .endpoint -}}
- name: OTEL_TRACES_EXPORTER
  value: otlp
- name: OTEL_EXPORTER_OTLP_ENDPOINT
  value: {{ .endpoint | quote }}
- name: OTEL_EXPORTER_OTLP_PROTOCOL
  value: {{ .protocol | quote }}
- name: OTEL_TRACES_SAMPLER
  value: parentbased_traceidratio
- name: OTEL_TRACES_SAMPLER_ARG
  value: {{ .ratio | quote }}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* How Prometheus connects to an endpoint with certificates. Takes a dict of root and name (in the certificate). */}}
{{- define "trunkline.scrapeTls" -}}
{{- $secret := .root.Values.observability.monitors.tlsSecret -}}
scheme: https
tlsConfig:
  serverName: {{ .name }}
  ca: {secret: {name: {{ $secret }}, key: ca.crt}}
  cert: {secret: {name: {{ $secret }}, key: tls.crt}}
  keySecret: {name: {{ $secret }}, key: tls.key}
{{- end -}}

{{/* What Prometheus presents. Takes an entry of a Secret: a dict of name and key. */}}
{{- define "trunkline.scrapeKey" -}}
{{- if .name -}}
authorization:
  credentials: {name: {{ .name }}, key: {{ .key }}}
{{- end -}}
{{- end -}}

{{/* The objective's time as the label le of a histogram has it: 1.0, not 1. Takes the root. */}}
{{- define "trunkline.firstTokenBucket" -}}
{{- $seconds := printf "%v" (.Values.observability.rules.firstTokenSeconds | default 0.5) -}}
{{- ternary $seconds (printf "%s.0" $seconds) (contains "." $seconds) -}}
{{- end -}}

{{/* The longest startupSeconds of all pools. Takes the root. */}}
{{- define "trunkline.longestStartup" -}}
{{- $longest := 0 -}}
{{- range $pool := keys .Values.workers -}}
{{- $longest = max $longest (include "trunkline.pool" (dict "root" $ "pool" $pool) | fromJson).startupSeconds -}}
{{- end -}}
{{- $longest -}}
{{- end -}}
