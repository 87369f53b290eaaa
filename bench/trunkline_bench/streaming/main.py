"""`make bench-streaming`: what one router process adds to a stream, compared with a hop that only passes bytes on.

Source, hop and client are separate processes, and the source computes nothing. The hops take turns, and the report has
medians. All processes share the machine's cores, so the hop's own CPU time shows how much one core can do. The router
is measured over gRPC and over HTTP, and its HTTP server also alone, with an application that does nothing. Chats are
measured as text, and as answers in which the router looks for reasoning and calls. With `--smg`, the gateway SMG takes
turns too, in front of a source that speaks its protocol. `--http` measures only what compares HTTP with gRPC.
"""

import argparse
import asyncio
from importlib.util import find_spec
from pathlib import Path

from trunkline_bench.reports.markdown import listed, table
from trunkline_bench.reports.provenance import facts, make_command
from trunkline_bench.streaming.client import Load
from trunkline_bench.streaming.processes import ROUTER, Hop, hops, run
from trunkline_bench.streaming.tables import (
    LATENCY,
    NO_SMG,
    REQUEST_ROUNDS,
    REQUEST_STREAMS,
    REQUESTS,
    STEPS_PER_S,
    STREAMING,
    TOKENS,
    WHOLE,
    Runs,
    beside_smg,
    latency_rows,
    ours,
    request_rows,
    streaming_rows,
)

RESULTS = Path(__file__).parents[2] / "results"
PACED_TOKENS = 100
STALLED, READING, STALLED_TOKENS = 4, 4, 50_000
# Wires by the prompts that they accept
TAKE_IDS, TAKE_TEXT = ("edge", "worker", "vllm", "http"), ("edge", "completions", "http")


async def streams(found: dict[str, Hop], rounds: int, *, paced: bool) -> Runs:
    runs: Runs = {}
    for _ in range(rounds):
        for count, tokens in TOKENS.items():
            for name, hop in found.items():
                steps_per_s = STEPS_PER_S if paced else 0.0
                load = Load(hop.address, hop.wire, count, PACED_TOKENS if paced else tokens, steps_per_s=steps_per_s)
                runs.setdefault((name, count), []).append(one := await run(hop, load))
                print(f"{name}, {count} streams: {one.seen.messages / one.seen.seconds:,.0f} messages/s", flush=True)
    return runs


async def requests(found: dict[str, Hop], rounds: int, *, text: bool) -> Runs:
    runs: Runs = {}
    for _ in range(rounds):
        for name, hop in found.items():
            if hop.wire not in (TAKE_TEXT if text else TAKE_IDS):
                continue
            wires = {name: hop.wire} | ({name + WHOLE: "http whole"} if hop.wire == "http" else {})
            for row, wire in wires.items():
                load = Load(hop.address, wire, REQUEST_STREAMS, 1, rounds=REQUEST_ROUNDS, text=text)
                runs.setdefault((row, REQUEST_STREAMS), []).append(one := await run(hop, load))
                print(f"{row}: {one.seen.requests / one.seen.seconds:,.0f} requests/s", flush=True)
    return runs


async def stalled(found: dict[str, Hop]) -> str:
    hop = found[ROUTER]
    load = Load(hop.address, hop.wire, STALLED + READING, STALLED_TOKENS, stalled=STALLED)
    one = await run(hop, load)
    return (
        f"{STALLED} clients stop reading streams with 20 log-probabilities per token, while {READING} others read. The "
        f"router's resident memory grows from {one.resident_mib:.0f} to at most {one.peak_mib:.0f} MiB, and the others "
        f"get {one.seen.tokens / one.seen.seconds:,.0f} tokens/s. When the {STALLED} read on, their streams end with "
        f"{', '.join(sorted(set(one.seen.stalled_ended))) or 'no error'}.\n"
    )


async def measure(rounds: int, before: Path | None, smg: Path | None, *, only_http: bool) -> str:
    async with hops(0.0, before, smg) as found:
        fast = await streams(found, rounds, paced=False)
        by_ids = await requests(found, rounds, text=False)
        by_text = await requests(found, rounds, text=True)
        memory = "" if only_http else f"\n## Clients that stop reading\n\n{await stalled(found)}"
    async with hops(STEPS_PER_S, before, smg) as found:
        paced = await streams(found, rounds, paced=True)
    request_table = request_rows(ours(by_ids), "token ids") | request_rows(ours(by_text), "text")
    return (
        "## Without pacing\n\n"
        + table(streaming_rows(ours(fast)), STREAMING)
        + f"\n## Paced: {STEPS_PER_S:.0f} steps/s\n\n"
        + table(latency_rows(ours(paced)), LATENCY)
        + f"\n## Requests of one token, {REQUEST_STREAMS} at once\n\n"
        + table(request_table, REQUESTS)
        + memory
        + f"\n## Beside SMG\n\n{beside_smg(smg, fast, paced, by_text)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--before", type=Path, help="another checkout, whose router takes turns too")
    parser.add_argument("--http", action="store_true", help="only what compares HTTP with gRPC, in a report of its own")
    parser.add_argument("--smg", type=Path, help="the command that starts SMG: DIR/bin/smg of the package smg")
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if arguments.smg is None:
        print(f"bench-streaming: {NO_SMG}")
    elif not arguments.smg.is_file():
        parser.error(f"--smg: there is no {arguments.smg}")
    elif find_spec("smg_grpc_proto") is None:
        parser.error("--smg needs the package smg-grpc-proto of the extra trunkline[dev]")
    flags = [
        "--rounds",
        str(arguments.rounds),
        *(["--http"] if arguments.http else []),
        *(["--before", "DIR"] if arguments.before else []),
        *(["--smg", "DIR/bin/smg"] if arguments.smg else []),
    ]
    names = ("trunkline", "grpcio", "protobuf", "uvloop", "httptools")
    found = facts(make_command("bench-streaming", flags), "shared by source, hop and client", names)
    text = (
        "# Streaming through one router process\n\n"
        + listed(found)
        + "- medians of the rounds\n\n"
        + asyncio.run(measure(arguments.rounds, arguments.before, arguments.smg, only_http=arguments.http))
    )
    print(text)
    arguments.output.mkdir(parents=True, exist_ok=True)
    name = "streaming-http" if arguments.http else "streaming"
    (arguments.output / f"{name}-{found['date']}.md").write_text(text)


if __name__ == "__main__":
    main()
