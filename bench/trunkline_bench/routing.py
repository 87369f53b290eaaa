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
from trunkline.v1.worker_pb2 import BlocksStored, CacheEvent, CacheEvents, WatchCacheResponse
from trunkline_bench.simulation import report
from trunkline_router.policy import WorkerView, choose
from trunkline_router.prefix_index import PrefixIndex, keys_of

RESULTS = Path(__file__).parents[1] / "results"
BLOCK_SIZE = 16
PROMPTS = (8_192, 102_400)
FLEETS = (64, 1_000)
DECISIONS = 300
SHARED = (0, 0, 0, 2_000, 4_000, 8_000)  # tokens of the prompt that a worker holds: of these, one at random


def fleet(workers: int, blocks: int, chain: list[int], draw: Random) -> tuple[PrefixIndex, int]:
    """An index of so many blocks over the workers, some of which hold a part of the prompt; and all their bits."""
    index = PrefixIndex()
    slots = [index.attach() for _ in range(workers)]
    for slot in slots:
        index.store(slot, chain[: draw.choice(SHARED) // BLOCK_SIZE])
        index.store(slot, keys_of(draw.randbytes(16 * (blocks // workers))))
    return index, (1 << workers) - 1


def decisions(workers: int, blocks: int, tokens: int) -> list[str]:
    """p50 and p99 of a decision and its parts, in microseconds."""
    draw = Random(0)
    prompt = [draw.randrange(150_000) for _ in range(tokens)]
    root = root_hash("weights")
    chain = keys_of(b"".join(prompt_hashes(root, prompt, BLOCK_SIZE)))
    index, among = fleet(workers, blocks, chain, draw)
    names = [f"worker-{n}" for n in range(workers)]
    running = [draw.randrange(60) for _ in range(workers)]
    times: dict[str, list[float]] = {"hashing": [], "matching": [], "policy": []}
    gc.collect()
    gc.freeze()
    for _ in range(DECISIONS):
        began = time.perf_counter()
        chain = keys_of(b"".join(prompt_hashes(root, prompt, BLOCK_SIZE)))
        hashed = time.perf_counter()
        found = index.match(chain, among)
        matched_at = time.perf_counter()
        matched = {}
        for count, bits in found:
            while bits:
                bit = bits & -bits
                matched[bit] = count
                bits ^= bit
        views = [WorkerView(names[n], matched[1 << n] * BLOCK_SIZE, 0, running[n]) for n in range(workers)]
        choose(tokens, views, BLOCK_SIZE, draw)
        times["hashing"].append(hashed - began)
        times["matching"].append(matched_at - hashed)
        times["policy"].append(time.perf_counter() - matched_at)
    gc.unfreeze()
    total = [sum(parts) for parts in zip(*times.values(), strict=True)]
    columns = [total, [a + b for a, b in zip(times["matching"], times["policy"], strict=True)], *times.values()]
    return [
        f"{report.percentile(column, 0.5) * 1e6:,.0f} / {report.percentile(column, 0.99) * 1e6:,.0f}"
        for column in columns
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
        + report.table(rows, ("all", "matching and policy", "hashing", "matching", "policy"))
        + "\n"
        + report.table({"64 workers": ingest(arguments.blocks)}, ("block events/s", "bytes per indexed block"))
    )
    print(text)
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / f"routing-{datetime.now(UTC):%Y-%m-%d}.md").write_text(text)


if __name__ == "__main__":
    main()
