"""How long a routing decision takes at the size of a fleet, and how fast the index takes cache events in.

usage: python -m trunkline_bench.routing [--blocks 1000000] [--output bench/results]

A decision is what a router does between a tokenized prompt and a chosen worker: hashing the prompt's blocks, finding
every worker's longest prefix, and the policy. Its parts are timed apart too.
"""

import argparse
import gc
import time
import tracemalloc
from datetime import UTC, datetime
from pathlib import Path
from random import Random

from trunkline.block_hash import prompt_hashes, root_hash
from trunkline.v1.worker_pb2 import (
    BlocksStored,
    CacheEvent,
    CacheEvents,
    GetModelResponse,
    LoadSample,
    StepCostModel,
    WatchCacheResponse,
)
from trunkline_bench.simulation import report
from trunkline_router.prefix_index import PrefixIndex, keys_of
from trunkline_router.route import chains_of, route_chains
from trunkline_router.route_request import RouteRequest
from trunkline_router.routing_policy import RoutingPolicy
from trunkline_router.worker_blocks import WorkerBlocks
from trunkline_router.worker_state import WorkerState

RESULTS = Path(__file__).parents[1] / "results"
BLOCK_SIZE = 16
PROMPTS = (8_192, 102_400)
FLEETS = (64, 1_000)
DECISIONS = 300
REPORTS_PER_DECISION = 50  # a worker in so many reports between two decisions: 20 samples and 1,000 requests a second
SHARED = (0, 0, 0, 2_000, 4_000, 8_000)  # tokens of the prompt that a worker holds: of these, one at random


def fleet(workers: int, blocks: int, chain: list[int], draw: Random) -> tuple[PrefixIndex, list[WorkerState]]:
    """Busy workers with so many blocks in all, some of which hold a part of the prompt."""
    index = PrefixIndex()
    states = []
    for number in range(workers):
        model = GetModelResponse(
            worker_id=f"worker-{number}",
            fingerprint="weights",
            block_size=BLOCK_SIZE,
            max_step_tokens=4096,
            max_running_requests=256,
        )
        state = WorkerState(model, WorkerBlocks(index))
        state.blocks.store(chain[: draw.choice(SHARED) // BLOCK_SIZE])
        state.blocks.store(keys_of(draw.randbytes(16 * (blocks // workers))))
        states.append(state)
        report_load(state, draw)
    return index, states


def report_load(state: WorkerState, draw: Random) -> None:
    """A new sample from the worker."""
    running = draw.randrange(60)
    state.take_load(
        LoadSample(
            running=running,
            running_kv_tokens=running * 3000,
            uncached_tokens_by_lane=[0, draw.choice((0, 0, 5000)), 0],
            kv_live_blocks=running * 190,
            kv_free_blocks=40_000 - running * 190,
            step_cost=StepCostModel(fixed_s=0.004, token_s=25e-6, kv_token_s=3e-8, pair_s=1e-9),
        ),
        now_s=0.0,
    )


def decisions(workers: int, blocks: int, tokens: int) -> list[str]:
    """p50 and p99 of a decision and its parts, in microseconds. Between two, some workers report and one is sent to."""
    draw = Random(0)
    prompt = [draw.randrange(150_000) for _ in range(tokens)]
    root = root_hash("weights")
    index, states = fleet(workers, blocks, keys_of(b"".join(prompt_hashes(root, prompt, BLOCK_SIZE))), draw)
    among = (1 << workers) - 1
    policy, request = RoutingPolicy(), RouteRequest(prompt)
    times: dict[str, list[float]] = {"all": [], "hashing": [], "matching and policy": [], "of it, matching": []}
    gc.collect()
    gc.freeze()
    for _ in range(DECISIONS):
        for state in draw.sample(states, workers // REPORTS_PER_DECISION):
            report_load(state, draw)
        began = time.perf_counter()
        chains = chains_of(states, request)
        hashed = time.perf_counter()
        route_chains(index, states, request, chains, policy, draw)
        routed = time.perf_counter()
        (chain,) = chains.values()
        index.match(chain, among)
        matched = time.perf_counter()
        times["all"].append(routed - began)
        times["hashing"].append(hashed - began)
        times["matching and policy"].append(routed - hashed)
        times["of it, matching"].append(matched - routed)
    gc.unfreeze()
    return [
        f"{report.percentile(column, 0.5) * 1e6:,.0f} / {report.percentile(column, 0.99) * 1e6:,.0f}"
        for column in times.values()
    ]


def ingest(blocks: int) -> list[str]:
    """Block events per second from the bytes of a message into the index, and the index's memory."""
    draw = Random(0)
    messages = []
    for sequence in range(blocks // 64):
        events = [CacheEvent(stored=BlocksStored(block_hashes=draw.randbytes(16 * 32))) for _ in range(2)]
        item = WatchCacheResponse(epoch=1, sequence=sequence, events=CacheEvents(events=events))
        messages.append(item.SerializeToString())
    index = PrefixIndex()
    slots = [index.attach() for _ in range(64)]
    gc.collect()
    started_s = time.perf_counter()
    for number, message in enumerate(messages):
        for event in WatchCacheResponse.FromString(message).events.events:
            index.store(slots[number % 64], keys_of(event.stored.block_hashes))
    rate = len(messages) * 64 / (time.perf_counter() - started_s)
    del index
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    index = PrefixIndex()
    slots = [index.attach() for _ in range(64)]
    for number in range(blocks // 4096):
        index.store(slots[number % 64], keys_of(draw.randbytes(16 * 4096)))
    used = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    return [f"{rate:,.0f}", f"{used / (blocks // 4096 * 4096):,.0f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    rows = {
        f"{tokens:,} tokens, {workers:,} workers": decisions(workers, arguments.blocks, tokens)
        for tokens in PROMPTS
        for workers in FLEETS
    }
    text = (
        "# A routing decision, and the index\n\n"
        + report.facts("python -m trunkline_bench.routing")
        + f"- {arguments.blocks:,} indexed blocks of {BLOCK_SIZE} tokens; p50 / p99 of {DECISIONS} decisions, "
        "microseconds\n\n"
        + report.table(rows, ("all", "hashing", "matching and policy", "of it, matching"))
        + "\n"
        + report.table({"64 workers": ingest(arguments.blocks)}, ("block events/s", "bytes per indexed block"))
    )
    print(text)
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / f"routing-{datetime.now(UTC):%Y-%m-%d}.md").write_text(text)


if __name__ == "__main__":
    main()
