/** What the router sends (docs/page.md). Values that are unknown, or that the caller may not see, are null. */

type Maybe<T> = T | null;

export interface FleetView {
  at_unix_ms: number;
  router: RouterView;
  you: You;
  workers: WorkerView[];
  history: { points: HistoryPoint[]; keeps_s: number };
  prefixes: Maybe<{ by_tenant: TenantPrefixes[]; half_life_s: number }>;
  requests: RequestSummary[];
  running: RequestSummary[];
  tenants: TenantView[];
}

export interface RouterView {
  name: string;
  uptime_s: number;
  version: string;
  policy: string;
  redis: string;
  open_requests: number;
  watchers: number;
  other_routers: number;
}

export interface You {
  tenant: string;
  is_operator: boolean;
  sees_cache: boolean;
  sees_requests: boolean;
  can_drain: boolean;
}

export interface LaneView {
  lane: string;
  running: Maybe<number>;
  waiting: Maybe<number>;
  ttft_p50_s: Maybe<number>;
  ttft_p99_s: Maybe<number>;
  itl_p50_s: Maybe<number>;
}

export interface BatchView {
  steps_per_s: Maybe<number>;
  prefill_tokens_per_s: Maybe<number>;
  decode_tokens_per_s: Maybe<number>;
  padding_tokens_per_s: Maybe<number>;
  sequences: Maybe<number>;
  busy_share: Maybe<number>;
}

export interface WorkerView {
  worker_id: string;
  address: string;
  model: string;
  state: string;
  reason: string;
  running: Maybe<number>;
  waiting: Maybe<number>;
  most_running: Maybe<number>;
  lanes: Maybe<LaneView[]>;
  kv: Maybe<{ live_blocks: Maybe<number>; cached_blocks: Maybe<number>; free_blocks: Maybe<number>; block_tokens: number }>;
  batch: Maybe<BatchView>;
  output_tokens_per_s: Maybe<number>;
  ttft_p50_s: Maybe<number>;
  hit_rate: Maybe<number>;
  index_accuracy: Maybe<number>;
  index_accuracy_requests: Maybe<number>;
  routed_by_load: Maybe<boolean>;
  preemptions_per_s: Maybe<number>;
  open_choices: Maybe<number>;
  cost_per_million_output_tokens: Maybe<number>;
  expert_imbalance: Maybe<number>;
  state_since_unix_ms: Maybe<number>;
  predicted_ttft: Maybe<{ requests: number; predicted_p50_s: Maybe<number>; real_p50_s: Maybe<number> }>;
}

export interface HistoryPoint {
  at_unix_ms: number;
  workers?: Maybe<number>;
  running: Maybe<number>;
  waiting: Maybe<number>;
  prefill_tokens_per_s: Maybe<number>;
  decode_tokens_per_s: Maybe<number>;
  padding_tokens_per_s: Maybe<number>;
  kv_live_blocks: Maybe<number>;
  kv_cached_blocks: Maybe<number>;
  kv_free_blocks: Maybe<number>;
  output_tokens_per_s: Maybe<number>;
  ttft_p50_s: Maybe<number>;
  hit_rate: Maybe<number>;
}

export interface TenantPrefixes {
  tenant: string;
  roots: PrefixNode[];
}

export interface PrefixNode {
  id: string;
  tokens: number;
  own_tokens: number;
  hits: number;
  age_s: number;
  holders: string[];
  children: PrefixNode[];
}

export interface TenantView {
  tenant: string;
  running: Maybe<number>;
  weight: Maybe<number>;
  lane: string;
  quotas: { quota: string; limit: Maybe<number>; used: Maybe<number> }[];
  refused: Maybe<number>;
}

export interface RequestSummary {
  request_id: string;
  tenant: string;
  model: string;
  endpoint: string;
  protocol: string;
  lane: string;
  started_unix_ms: number;
  is_running: boolean;
  outcome: string;
  is_failed: boolean;
  worker_id: Maybe<string>;
  attempts: number;
  prompt_tokens: number;
  cached_tokens: Maybe<number>;
  completion_tokens: number;
  reasoning_tokens: number;
  tool_calls: number;
  choices: number;
  ttft_s: Maybe<number>;
  e2e_s: Maybe<number>;
  cause: string;
  router: string;
  refused_by: string;
  refused_field: string;
  cache_miss: string;
  seen_tokens: number;
  inputs: number;
}

/** Times are in seconds since the request's start. */
export interface RequestDetail extends RequestSummary {
  trace_id: string;
  max_tokens: Maybe<number>;
  cost: Maybe<number>;
  stalled_s: number;
  ttft_parts: { part: string; start_s: number; duration_s: number; note: string }[];
  placements: Placement[];
  attempts_made: Attempt[];
}

export interface Placement {
  start_s: number;
  duration_s: number;
  worker_id: Maybe<string>;
  policy: string;
  reason: string;
  matched_tokens: Maybe<number>;
  predicted_ttft_s: Maybe<number>;
  candidates: Candidate[];
}

export interface Candidate {
  worker_id: string;
  matched_tokens: Maybe<number>;
  queued_tokens: number;
  running: number;
  queue_s: number;
  prefill_s: number;
  decode_s: number;
  kv_wait_s: number;
  kv_penalty_s: number;
  slow_start_s: number;
  others_s: number;
  cost_s: number;
  routed_by_load: boolean;
}

export interface Attempt {
  worker_id: Maybe<string>;
  start_s: number;
  first_output_s: Maybe<number>;
  end_s: Maybe<number>;
  ended: string;
  problem: string;
  resumed_at_tokens: number;
  choices: ChoiceTimeline[];
}

export interface ChoiceTimeline {
  admitted_s: Maybe<number>;
  first_token_s: Maybe<number>;
  ended_s: Maybe<number>;
  decode_steps: number;
  preemptions: number;
  recomputed_tokens: number;
  device_s: number;
  cached_tokens: Maybe<number>;
  chunks: Chunk[];
  gaps: { at_s: number; duration_s: number }[];
  num_gaps: number;
}

export interface Chunk {
  start_s: number;
  duration_s: number;
  tokens: number;
  step_prefill_tokens: Maybe<number>;
  step_decode_tokens: Maybe<number>;
  step_padding_tokens: Maybe<number>;
  step_sequences: Maybe<number>;
}
