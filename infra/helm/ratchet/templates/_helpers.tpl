{{- define "ratchet.name" -}}{{ .Release.Name | trunc 40 | trimSuffix "-" }}{{- end }}

{{- define "ratchet.image" -}}
{{- if .Values.image.digest -}}{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}{{- end -}}
{{- end }}

{{- define "ratchet.selector" -}}
app.kubernetes.io/name: ratchet
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "ratchet.labels" -}}
{{ include "ratchet.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end }}

{{/* What has to be said before anything starts, one sentence each. */}}
{{- define "ratchet.refusals" -}}
{{- $s := .Values.settings -}}
{{- $_ := required "existingSecret is empty: make a Secret with database-url, actor-salt, session-secrets and webhook-keys, and name it" .Values.existingSecret -}}
{{- $_ := required "config is empty: give it a ratchet.toml with at least one [policies.NAME]" .Values.config -}}
{{- $_ := required "settings.kafka is empty: name the brokers as host:port" $s.kafka -}}
{{- $_ := required "settings.segments is empty: replicas share it, so it is s3://bucket/prefix" $s.segments -}}
{{- $_ := required "settings.weights is empty: replicas share it, so it is s3://bucket/prefix, or with vLLM the folder vllm.weightsPath" $s.weights -}}
{{- if eq $s.segments $s.weights }}{{ fail "settings.segments and settings.weights are the same place: give each a prefix of its own" }}{{ end -}}
{{- if and $s.states (has $s.states (list $s.segments $s.weights)) }}{{ fail "settings.states is the place of segments or weights: give it a prefix of its own" }}{{ end -}}
{{- if or $s.rayAddress .Values.references.ray.enabled -}}
{{- if not (and (contains "://" $s.states) (contains "://" $s.weights)) }}{{ fail "machines of a Ray cluster share no folder: settings.states and settings.weights have to be object storage, s3://bucket/prefix" }}{{ end -}}
{{- end -}}
{{- if not (or .Values.engine.enabled $s.engines .Values.vllm.enabled) }}{{ fail "nobody samples: enable engine or vllm, or name servers in settings.engines" }}{{ end -}}
{{- if and .Values.autoscaling.ingest.enabled (not .Values.autoscaling.keda.enabled) }}{{ fail "autoscaling.ingest follows the lag, which KEDA reads: enable autoscaling.keda, or switch autoscaling.ingest off" }}{{ end -}}
{{- if .Values.autoscaling.keda.enabled -}}
{{- $_ := required "autoscaling.keda.prometheus is empty: name the server that KEDA asks, such as http://prometheus.monitoring:9090" .Values.autoscaling.keda.prometheus -}}
{{- end -}}
{{- if .Values.vllm.enabled -}}
{{- $_ := required "vllm.image is empty: name an image of vLLM with the plugin of infra/vllm" .Values.vllm.image -}}
{{- $_ := required "vllm.policy is empty: weights are replaced in place for one policy" .Values.vllm.policy -}}
{{- $_ := required "vllm.weightsClaim is empty: servers and keepers read the weight store as a folder" .Values.vllm.weightsClaim -}}
{{- if ne $s.weights .Values.vllm.weightsPath }}{{ fail "settings.weights is not vllm.weightsPath: servers and publisher read one folder under one path" }}{{ end -}}
{{- $_ := required "vllm.start is empty: name the version that servers start on" .Values.vllm.start -}}
{{- end -}}
{{- end }}

{{- define "ratchet.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "ratchet.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{/* How object storage is reached: the processes, and the workers of a Ray cluster, which get its address from the loop. */}}
{{- define "ratchet.storage" -}}
{{- $secret := .Values.existingSecret -}}
{{- with .Values.settings.s3 }}
{{- if .enabled }}
- {name: AWS_ACCESS_KEY_ID, valueFrom: {secretKeyRef: {name: {{ $secret }}, key: s3-access-key, optional: true}}}
- {name: AWS_SECRET_ACCESS_KEY, valueFrom: {secretKeyRef: {name: {{ $secret }}, key: s3-secret-key, optional: true}}}
- {name: AWS_DEFAULT_REGION, value: {{ .region | quote }}}
{{- if .endpoint }}
- {name: AWS_ENDPOINT_URL, value: {{ .endpoint | quote }}}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* Where everything is. Every name once: Helm 4 refuses duplicates. */}}
{{- define "ratchet.environment" -}}
{{- $secret := .root.Values.existingSecret -}}
{{- $s := .root.Values.settings -}}
- {name: RATCHET_DATA, value: /data}
- {name: RATCHET_CONFIG, value: /etc/ratchet/ratchet.toml}
- {name: RATCHET_METRICS, value: "0.0.0.0:9464"}
- {name: RATCHET_LOG_FORMAT, value: json}
- {name: RATCHET_LOG_LEVEL, value: {{ $s.logLevel | quote }}}
{{- if $s.region }}
- {name: RATCHET_REGION, value: {{ $s.region | quote }}}
{{- end }}
- {name: RATCHET_KAFKA_BOOTSTRAP, value: {{ $s.kafka | quote }}}
- {name: RATCHET_SEGMENTS, value: {{ $s.segments | quote }}}
- {name: RATCHET_WEIGHTS, value: {{ $s.weights | quote }}}
{{- if $s.states }}
- {name: RATCHET_STATES, value: {{ $s.states | quote }}}
{{- end }}
- {name: RATCHET_INGEST, value: {{ $s.ingest | quote }}}
- {name: RATCHET_HOST, value: "0.0.0.0"}
- {name: RATCHET_PORT, value: "8400"}
{{- if $s.standby }}
- {name: RATCHET_STANDBY, value: {{ $s.standby | quote }}}
{{- end }}
{{- if $s.mlflow }}
- {name: RATCHET_MLFLOW_URI, value: {{ $s.mlflow | quote }}}
{{- end }}
{{- if $s.hosts }}
- {name: RATCHET_HOSTS, value: {{ join "," (append $s.hosts (printf "%s-api" (include "ratchet.name" .root))) | quote }}}
{{- end }}
{{- if $s.origins }}
- {name: RATCHET_ORIGINS, value: {{ join "," $s.origins | quote }}}
{{- end }}
{{- $engines := $s.engines }}
{{- if and (not $engines) .root.Values.vllm.enabled }}
{{- range .root.Values.vllm.roles }}{{ $engines = append $engines (printf "vllm+http://%s-vllm-%s:8000" (include "ratchet.name" $.root) .) }}{{ end }}
{{- end }}
{{- if not $engines }}{{ $engines = list (printf "http://%s-engine:8401" (include "ratchet.name" .root)) }}{{ end }}
- {name: RATCHET_ENGINES, value: {{ join "," $engines | quote }}}
{{- if $s.traces }}
- {name: RATCHET_TRACES, value: {{ $s.traces | quote }}}
- {name: RATCHET_TRACES_SHARE, value: {{ $s.tracesShare | quote }}}
{{- end }}
{{- if $s.rayAddress }}
- {name: RAY_ADDRESS, value: {{ $s.rayAddress | quote }}}
- {name: RAY_AUTH_MODE, value: token}
{{- if .root.Values.references.ray.enabled }}
- {name: RAY_AUTH_TOKEN, valueFrom: {secretKeyRef: {name: {{ include "ratchet.name" .root }}-ray, key: auth_token}}} # KubeRay makes it
{{- else }}
- {name: RAY_AUTH_TOKEN, valueFrom: {secretKeyRef: {name: {{ $secret }}, key: ray-token, optional: true}}}
{{- end }}
{{- end }}
- {name: RATCHET_DATABASE_URL, valueFrom: {secretKeyRef: {name: {{ $secret }}, key: database-url}}}
- {name: RATCHET_INBOX_URL, valueFrom: {secretKeyRef: {name: {{ $secret }}, key: inbox-url, optional: true}}}
- {name: RATCHET_ACTOR_SALT, valueFrom: {secretKeyRef: {name: {{ $secret }}, key: actor-salt}}}
- {name: RATCHET_SESSION_SECRETS, valueFrom: {secretKeyRef: {name: {{ $secret }}, key: session-secrets}}}
- {name: RATCHET_WEBHOOK_KEYS, valueFrom: {secretKeyRef: {name: {{ $secret }}, key: webhook-keys}}}
- {name: RATCHET_KAFKA_PASSWORD, valueFrom: {secretKeyRef: {name: {{ $secret }}, key: kafka-password, optional: true}}}
- {name: RATCHET_ENGINE_KEY, valueFrom: {secretKeyRef: {name: {{ $secret }}, key: engine-key, optional: true}}}
- {name: RATCHET_VLLM_KEY, valueFrom: {secretKeyRef: {name: {{ $secret }}, key: vllm-key, optional: true}}}
- {name: RATCHET_SGLANG_KEY, valueFrom: {secretKeyRef: {name: {{ $secret }}, key: sglang-key, optional: true}}}
- {name: RATCHET_SGLANG_ADMIN_KEY, valueFrom: {secretKeyRef: {name: {{ $secret }}, key: sglang-admin-key, optional: true}}}
{{- include "ratchet.storage" .root }}
- {name: HF_HUB_OFFLINE, value: "1"}
- {name: MLFLOW_DISABLE_TELEMETRY, value: "true"}
- {name: RAY_USAGE_STATS_ENABLED, value: "0"}
- {name: POD_IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
{{- end }}

{{- define "ratchet.mounts" -}}
- {name: config, mountPath: /etc/ratchet, readOnly: true}
- {name: data, mountPath: /data}
- {name: tmp, mountPath: /tmp}
{{- if .Values.models.existingClaim }}
- {name: models, mountPath: {{ .Values.models.mountPath }}, readOnly: true}
{{- end }}
{{- if .Values.vllm.enabled }}
- {name: weights, mountPath: {{ .Values.vllm.weightsPath }}}
{{- end }}
{{- end }}

{{- define "ratchet.models" -}}
{{- if .Values.models.existingClaim }}
- name: models
  persistentVolumeClaim: {claimName: {{ .Values.models.existingClaim }}, readOnly: true}
{{- end }}
{{- if .Values.vllm.enabled }}
- name: weights
  persistentVolumeClaim: {claimName: {{ .Values.vllm.weightsClaim }}}
{{- end }}
{{- end }}

{{- define "ratchet.spread" -}}
- maxSkew: 1
  topologyKey: kubernetes.io/hostname
  whenUnsatisfiable: ScheduleAnyway
  labelSelector: {matchLabels: {{ include "ratchet.selector" . | fromYaml | toJson }}}
{{- end }}
