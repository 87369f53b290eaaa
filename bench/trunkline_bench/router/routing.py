"""`make bench-routing`: time of a routing decision for large fleets, and the rate at which the index takes events.

A decision is what a router does between a tokenized prompt and a chosen worker: it hashes the prompt's blocks, finds
every worker's longest prefix, and applies the policy. The parts are also timed separately. A request pays for more: the
router also looks up the model's workers and limits, and leaves out workers that cannot take the request.
"""

import argparse
import gc
import time
import tracemalloc
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
from trunkline_bench.reports.markdown import listed, table
from trunkline_bench.reports.provenance import facts, make_command
from trunkline_bench.reports.statistics import percentile
from trunkline_bench.servers.demo_model import DEMO_MODEL
from trunkline_router.prompts.helper_pool import Helpers
from trunkline_router.prompts.tokenizer import PromptTokenizer
from trunkline_router.routing.prefix_index import PrefixIndex, WorkerBlocks, keys_of
from trunkline_router.routing.route import Route, chains_of, route_chains
from trunkline_router.routing.route_request import RouteRequest
from trunkline_router.routing.worker_state import WorkerState
from trunkline_router.workers.connected_worker import ConnectedWorker
from trunkline_router.workers.link_context import LinkContext
from trunkline_router.workers.pool import Pools
from trunkline_router.workers.session import WorkerSession
from trunkline_router.workers.tokenizer_pool import Tokenizers
from trunkline_router.workers.worker_link import WorkerLink

RESULTS = Path(__file__).parents[2] / "results"
BLOCK_SIZE = 16
PROMPTS = (8_192, 102_400)
FLEETS = (64, 1_000)
DECISIONS = 5_000
WHOLE_S = 20.0  # per size, the time in which decisions include hashing, which takes most of a decision
MODEL = "served"
CONTEXT = 131_072
REPORTS_PER_DECISION = 50  # one worker of 50 reports between two decisions: 20 samples/s each, 1,000 requests/s
SHARED = (0, 0, 0, 2_000, 4_000, 8_000)  # tokens of the prompt that a worker has cached, drawn at random


def fleet(workers: int, blocks: int, chain: list[int], draw: Random) -> tuple[Pools, list[ConnectedWorker]]:
    """Busy workers with `blocks` blocks in total, some with a part of the prompt. They have no connections."""
    pools = Pools(draw)
    helpers = Helpers()
    files = {path.name: path.read_bytes() for path in DEMO_MODEL.glob("tokenizer*.json")}
    tokenizer = PromptTokenizer(files, helpers)
    context = LinkContext("bench", Tokenizers(helpers), pools.index, pools.notify, draw)
    states = []
    for number in range(workers):
        model = GetModelResponse(
            model=MODEL,
            worker_id=f"worker-{number}",
            fingerprint="weights",
            block_size=BLOCK_SIZE,
            context_length=CONTEXT,
            kv_token_capacity=40_000 * BLOCK_SIZE,
            max_step_tokens=4096,
            max_running_requests=256,
        )
        link = WorkerLink(f"worker-{number}", context)
        worker = ConnectedWorker(
            model, WorkerBlocks(pools.index), tokenizer, WorkerSession(), link.breaker, link.address
        )
        worker.blocks.store(chain[: draw.choice(SHARED) // BLOCK_SIZE])
        worker.blocks.store(keys_of(draw.randbytes(16 * (blocks // workers))))
        link.worker = worker
        pools.links.append(link)
        states.append(worker)
        report_load(worker, draw)
    return pools, states


def report_load(state: WorkerState, draw: Random) -> None:
    """Gives the worker a new load sample."""
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


PARTS = ("whole request", "hashing to choice", "hashing", "matching and policy", "of which matching")


def decisions(workers: int, blocks: int, tokens: int) -> list[str]:
    """Cells with p50 and p99 of a decision and its parts, in microseconds. Some workers report between decisions."""
    draw = Random(0)
    prompt = [draw.randrange(150_000) for _ in range(tokens)]
    root = root_hash("weights")
    pools, states = fleet(workers, blocks, keys_of(b"".join(prompt_hashes(root, prompt, BLOCK_SIZE))), draw)
    among = (1 << workers) - 1
    request = RouteRequest(prompt)
    chains = chains_of(states, request)
    times: dict[str, list[float]] = {name: [] for name in PARTS}

    def some_report() -> None:
        for state in draw.sample(states, workers // REPORTS_PER_DECISION):
            report_load(state, draw)

    gc.collect()
    gc.freeze()
    until_s = time.perf_counter() + WHOLE_S
    for _ in range(DECISIONS):
        if time.perf_counter() < until_s:
            some_report()
            began = time.perf_counter()
            asked(pools, request)
            answered = time.perf_counter()
            chains = chains_of(states, request)
            hashed = time.perf_counter()
            times["whole request"].append(answered - began)
            times["hashing"].append(hashed - answered)
        some_report()
        began = time.perf_counter()
        route_chains(pools.index, states, request, chains, pools.policy, draw)
        routed = time.perf_counter()
        (chain,) = chains.values()
        pools.index.match(chain, among)
        matched = time.perf_counter()
        times["matching and policy"].append(routed - began)
        times["of which matching"].append(matched - routed)
    gc.unfreeze()
    both = zip(times["hashing"], times["matching and policy"], strict=False)
    times["hashing to choice"] = [hashing + rest for hashing, rest in both]
    whole = len(times["hashing"])
    return [
        *(f"{percentile(column, 0.5) * 1e6:,.0f} / {percentile(column, 0.99) * 1e6:,.0f}" for column in times.values()),
        f"{DECISIONS:,}" + (f", with hashing {whole:,}" if whole < DECISIONS else ""),
    ]


def asked(pools: Pools, request: RouteRequest) -> Route[ConnectedWorker]:
    """The calls to `Pools` for one request without `max_tokens`, as in service.py and placement.py."""
    pool = pools.pool(MODEL)
    assert pool.limits.context_length > len(request.prompt)  # as the router checks the request
    return pools.route(pool.allowed(pool.with_room(len(request.prompt) + 1), request.now_s), request)


def ingest(blocks: int) -> list[str]:
    """Cells with block events per second, from the bytes of a message into the index, and the index's memory."""
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
    flags = [] if arguments.blocks == parser.get_default("blocks") else ["--blocks", str(arguments.blocks)]
    found = facts(make_command("bench-routing", flags), "one of them", ("trunkline", "numpy", "protobuf"))
    rows = {
        f"{tokens:,} tokens, {workers:,} workers": decisions(workers, arguments.blocks, tokens)
        for tokens in PROMPTS
        for workers in FLEETS
    }
    text = (
        "# A routing decision, and the index\n\n"
        + listed(found)
        + f"- {arguments.blocks:,} indexed blocks of {BLOCK_SIZE} tokens; p50 / p99 of the decisions, in microseconds\n"
        "- whole request: the model's workers and limits, `Pools.route` with its filters, hashing and choice\n\n"
        + table(rows, (*PARTS, "decisions"))
        + "\n"
        + table({"64 workers": ingest(arguments.blocks)}, ("block events/s", "bytes per indexed block"))
    )
    print(text)
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / f"routing-{found['date']}.md").write_text(text)


if __name__ == "__main__":
    main()
