"""How soon each worker of a fleet would give a request its first token. Pure; all workers at once.

A prompt is computed in chunks, one per step, behind those that were there before it, and every step also computes the
decodes that run there. What a step takes, workers have learned and say. Where one has not said, it is taken to be like
the others.
"""

from dataclasses import dataclass, fields

import numpy as np

from trunkline_router.route_request import INTERACTIVE, RouteRequest
from trunkline_router.worker_facts import Column, WorkerTable

LANE_NAMES = ("interactive", "standard", "batch")

# Of a fleet that says nothing of its steps: costs count in tokens, and a decode slows a step by about 16 of them.
# fixed_s, token_s, kv_token_s, pair_s
DEFAULT_STEP_COST = (1e-3, 1e-4, 1e-4 / 64, 0.0)
# A worker fills a step with at least this share of its fixed time in chunks, however long its decodes take.
LEAST_ADDED_SHARE = 0.25
# Tokens that a running choice still has to say, about: after so many steps its blocks are free.
REMAINING_TOKENS = 256
# Where less of the pool is live, what waits does so for its turn only.
FORESEEN_SHARE = 0.5
# From this share of live blocks on, more choices mean preemptions soon. The penalty grows with the square of what is
# beyond it, and where the pool is full it is the time to compute the prompt, or what a running choice holds, again.
ROOMY_SHARE = 0.8
MOST_CROWDED = 2.0  # in multiples of what lies between ROOMY_SHARE and full
# What is computed although another worker holds it delays everybody else there, now and until the queue is empty again.
# Counting this share of it for every choice there keeps a busy fleet from computing things twice to save one request a
# little, which makes it busier still. Where even the shortest queue is long, all are: then only computing less helps,
# and it counts once more for each SHORT_QUEUE_S of that. Without this a fleet that was overloaded once stays so, at
# loads that it carries easily (docs/log.md).
OTHERS_SHARE = 0.05
SHORT_QUEUE_S = 0.01
LEAST_START_SHARE = 0.01  # of a fresh worker: it is never slower than a hundred times what it is


@dataclass(frozen=True, slots=True)
class Terms:
    """Parts of the predicted time, in seconds, by worker."""

    queue_s: Column
    prefill_s: Column
    decode_s: Column
    kv_wait_s: Column
    kv_penalty_s: Column
    slow_start_s: Column
    others_s: Column

    def cost_s(self) -> Column:
        own_s = self.queue_s + self.prefill_s + self.decode_s + self.kv_wait_s
        return own_s + self.kv_penalty_s + self.slow_start_s + self.others_s


TERM_NAMES = tuple(field.name for field in fields(Terms))


def predict(request: RouteRequest, workers: WorkerTable, draw: float) -> Terms:
    """The terms for each worker.

    draw: a random number in [0, 1): a worker whose slow-start share is at most this counts as so much slower for this
    request, so that it has its full chance with that share of requests
    """
    fixed_s, token_s, kv_token_s, pair_s = _step_costs(workers)
    lane = LANE_NAMES[request.lane]
    matched, choices = workers.matched_tokens, workers["choices"]
    queued = workers[f"queued_{lane}"]
    uncached = len(request.prompt) - matched
    decodes = np.minimum(choices, workers["most_running"])
    decoding_s = token_s * decodes + kv_token_s * workers["decode_kv_tokens"]
    room = workers["step_tokens" if request.lane == INTERACTIVE else "lower_step_tokens"] - decodes
    chunk_s = np.maximum(workers["step_target_s"] - fixed_s - decoding_s, LEAST_ADDED_SHARE * fixed_s)
    room = np.maximum(np.minimum(room, chunk_s / np.maximum(token_s, 1e-9)), 1.0)
    own_steps, queue_steps = np.ceil(uncached / room), queued / room

    queue_s = queued * (token_s + pair_s * workers["queued_context"]) + queue_steps * fixed_s
    prefill_s = uncached * (token_s + pair_s * (matched + uncached / 2)) + own_steps * fixed_s
    # Half a step, because one is under way where something runs.
    decode_s = (own_steps + queue_steps) * decoding_s + 0.5 * (decoding_s + fixed_s) * (choices > 0)

    wanted_blocks = (np.minimum(queued, workers["waiting_tokens"]) + uncached) / workers["block_size"] + 1.0
    knows_pool = workers["total_blocks"] > 0
    turnover_s = REMAINING_TOKENS * (fixed_s + decoding_s)  # in which those that run now will have ended
    missing = np.maximum(wanted_blocks - workers["available_blocks"], 0.0) * knows_pool
    missing_share = np.minimum(missing / np.maximum(workers["live_blocks"], 1.0), 1.0)
    places_share = np.maximum((choices + request.choices) / workers["most_running"] - 1.0, 0.0)
    share = (workers["live_blocks"] + wanted_blocks) / np.maximum(workers["total_blocks"], 1.0) * knows_pool
    # What waits may wait for room that a worker foresees to be needed, though there is some now.
    is_held_up = (missing > 0) | (places_share > 0) | (share > FORESEEN_SHARE)
    room_in_s = np.maximum(workers[f"admission_{lane}_s"], turnover_s * np.maximum(missing_share, places_share))
    kv_wait_s = np.maximum(room_in_s - queue_s, 0.0) * is_held_up

    crowded = np.clip((share - ROOMY_SHARE) / (1.0 - ROOMY_SHARE), 0.0, MOST_CROWDED)
    again = np.maximum(len(request.prompt), workers["decode_kv_tokens"] / np.maximum(choices, 1.0))
    kv_penalty_s = crowded * crowded * again * token_s

    fresh = np.maximum(workers["slow_start_share"], LEAST_START_SHARE)
    start = 1.0 - (fresh.max() - fresh)  # what counts is how much fresher than the others: they may have come together
    slow_start_s = (1.0 / start - 1.0) * (queue_s + prefill_s + decode_s) * (start <= draw)
    again_s = prefill_s * (matched.max() - matched) / np.maximum(uncached, 1.0)  # for what another worker holds
    others_s = OTHERS_SHARE * choices * (1.0 + queue_s.min() / SHORT_QUEUE_S) * again_s
    return Terms(queue_s, prefill_s, decode_s, kv_wait_s, kv_penalty_s, slow_start_s, others_s)


def block_s(workers: WorkerTable) -> Column:
    """Time to compute one block of a prompt, by worker."""
    return workers["block_size"] * _step_costs(workers)[1]  # type: ignore[no-any-return]


def _step_costs(workers: WorkerTable) -> np.ndarray:
    """[4, num_workers]; the median of the others, or the default, where a worker has not said."""
    costs = workers.columns[:4]
    unknown = np.isnan(costs[0])
    if not unknown.any():
        return costs
    known = costs[:, ~unknown]
    costs = costs.copy()
    costs[:, unknown] = (np.median(known, axis=1) if known.size else np.array(DEFAULT_STEP_COST))[:, None]
    return costs
