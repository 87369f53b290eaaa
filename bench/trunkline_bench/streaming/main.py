"""`make bench-streaming`: what one router process adds to a stream, compared with a hop that only passes bytes on.

Source, hop and client are separate processes, and the source computes nothing. The hops take turns, and the report has
medians. All processes share the machine's cores, so the hop's own CPU time shows how much one core can do. With
`--smg`, the gateway SMG takes turns too, in front of a source that speaks its protocol.
"""

import argparse
import asyncio
from importlib.util import find_spec
from pathlib import Path
from statistics import median

from trunkline_bench.reports.markdown import listed, table
from trunkline_bench.reports.provenance import facts, make_command
from trunkline_bench.streaming.client import Load
from trunkline_bench.streaming.processes import Hop, Run, hops, run
from trunkline_bench.streaming.smg import NOT_ALIKE, SMG, SMG_DIRECT, smg_version

RESULTS = Path(__file__).parents[2] / "results"
TOKENS = {64: 800, 256: 250}  # per stream, by the number of streams
PACED_TOKENS = 100
STEPS_PER_S = 20.0
REQUEST_STREAMS, REQUEST_ROUNDS = 64, 40
STALLED, READING, STALLED_TOKENS = 4, 4, 50_000
TAKE_IDS, TAKE_TEXT = ("edge", "worker", "vllm"), ("edge", "completions")  # wires by the prompts that they accept

Runs = dict[tuple[str, int], list[Run]]  # by hop and number of streams


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
            load = Load(hop.address, hop.wire, REQUEST_STREAMS, 1, rounds=REQUEST_ROUNDS, text=text)
            runs.setdefault((name, REQUEST_STREAMS), []).append(one := await run(hop, load))
            print(f"{name}: {one.seen.requests / one.seen.seconds:,.0f} requests/s", flush=True)
    return runs


def streaming_rows(runs: Runs) -> dict[str, list[str]]:
    rows = {}
    for (name, count), taken in runs.items():
        base = runs["passthrough", count]
        cells = [
            f"{median(one.seen.messages / one.seen.seconds for one in taken):,.0f}",
            f"{tokens_per_s(taken):,.0f}",
            f"{tokens_per_s(taken) / tokens_per_s(base):.0%}",
            f"{median(one.seen.tokens / one.seen.messages for one in taken):.1f}",
            f"{1e6 / tokens_per_cpu_s(taken):.1f}",
            f"{tokens_per_cpu_s(taken):,.0f}",
            f"{tokens_per_cpu_s(taken) / tokens_per_cpu_s(base):.0%}",
        ]
        rows[f"{name}, {count} streams"] = cells
    return rows


def tokens_per_s(taken: list[Run]) -> float:
    return median(one.seen.tokens / one.seen.seconds for one in taken)


def tokens_per_cpu_s(taken: list[Run]) -> float:
    return median(one.seen.tokens / one.hop_cpu_s for one in taken)


def messages_per_cpu_s(taken: list[Run]) -> float:
    return median(one.seen.messages / one.hop_cpu_s for one in taken)


STREAMING = (
    "messages/s",
    "tokens/s",
    "of passthrough",
    "tokens per message",
    "CPU µs per token",
    "tokens/s per core",
    "of passthrough",
)


def latency_rows(runs: Runs) -> dict[str, list[str]]:
    """Rows with the medians, over rounds, of each round's percentiles."""
    rows = {}
    for (name, count), taken in runs.items():
        p50, p99 = ages_ms(taken)
        base = ages_ms(runs["direct", count])
        cells = [
            f"{p50:.1f} / {p99:.1f}",
            f"{p50 - base[0]:+.1f} / {p99 - base[1]:+.1f}",
            f"{median(one.seen.tokens / one.seen.messages for one in taken):.2f}",
            f"{1e6 / messages_per_cpu_s(taken):.1f}",
            f"{messages_per_cpu_s(taken):,.0f}",
            f"{messages_per_cpu_s(taken) / messages_per_cpu_s(runs['passthrough', count]):.0%}",
        ]
        rows[f"{name}, {count} streams"] = cells
    return rows


def ages_ms(taken: list[Run]) -> tuple[float, float]:
    return median(one.seen.age_p50_ms for one in taken), median(one.seen.age_p99_ms for one in taken)


LATENCY = (
    "age of a token p50 / p99, ms",
    "more than direct, ms",
    "tokens per message",
    "CPU µs per message",
    "messages/s per core",
    "of passthrough",
)


def request_rows(runs: Runs, what: str) -> dict[str, list[str]]:
    rows = {}
    for (name, _), taken in runs.items():
        cpu_us = median(one.hop_cpu_s / one.seen.requests for one in taken) * 1e6
        rate = median(one.seen.requests / one.seen.seconds for one in taken)
        rows[f"{name}, {what}"] = [f"{rate:,.0f}", f"{cpu_us:.0f}", f"{1e6 / cpu_us:,.0f}"]
    return rows


REQUESTS = ("requests/s", "CPU µs per request", "requests/s per core")


async def stalled(found: dict[str, Hop]) -> str:
    hop = found["router"]
    load = Load(hop.address, hop.wire, STALLED + READING, STALLED_TOKENS, stalled=STALLED)
    one = await run(hop, load)
    return (
        f"{STALLED} clients stop reading streams with 20 log-probabilities per token, while {READING} others read. The "
        f"router's resident memory grows from {one.resident_mib:.0f} to at most {one.peak_mib:.0f} MiB, and the others "
        f"get {one.seen.tokens / one.seen.seconds:,.0f} tokens/s. When the {STALLED} read on, their streams end with "
        f"{', '.join(sorted(set(one.seen.stalled_ended))) or 'no error'}.\n"
    )


def ours(runs: Runs) -> Runs:
    return {key: taken for key, taken in runs.items() if key[0] not in (SMG, SMG_DIRECT)}


def beside_smg(smg: Path | None, fast: Runs, paced: Runs, by_text: Runs) -> str:
    """The tables for router and SMG, each in front of its own source and relative to its own "direct"."""
    if smg is None:
        return NO_SMG + "\n"
    fast_rows, paced_rows = {}, {}
    for name, direct in (("router", "direct"), (SMG, SMG_DIRECT)):
        for count in TOKENS:
            taken = fast[name, count]
            fast_rows[f"{name}, {count} streams"] = [f"{tokens_per_s(taken):,.0f}", *token_cells(taken)]
            (p50, p99), base = ages_ms(paced[name, count]), ages_ms(paced[direct, count])
            paced_rows[f"{name}, {count} streams"] = [
                *token_cells(paced[name, count]),
                f"{p50:.1f} / {p99:.1f}",
                f"{p50 - base[0]:+.1f} / {p99 - base[1]:+.1f}",
            ]
    requests_taken = {key: taken for key, taken in by_text.items() if key[0] in ("router", SMG)}
    return (
        f"{smg_version(smg)}, medians of the same rounds.\n\nWithout pacing:\n\n"
        + table(fast_rows, ("tokens/s", *PER_TOKEN))
        + f"\nPaced, {STEPS_PER_S:.0f} steps/s:\n\n"
        + table(paced_rows, (*PER_TOKEN, "age of a token p50 / p99, ms", "more than its own direct, ms"))
        + f"\nRequests of one token, {REQUEST_STREAMS} at once:\n\n"
        + table(request_rows(requests_taken, "text"), REQUESTS)
        + f"\n{NOT_ALIKE}"
    )


def token_cells(taken: list[Run]) -> list[str]:
    return [f"{1e6 / tokens_per_cpu_s(taken):.1f}", f"{tokens_per_cpu_s(taken):,.0f}"]


PER_TOKEN = ("CPU µs per token", "tokens/s per core")
NO_SMG = "SMG was not measured: `--smg COMMAND` names the command that starts it."


async def measure(rounds: int, before: Path | None, smg: Path | None) -> str:
    async with hops(0.0, before, smg) as found:
        fast = await streams(found, rounds, paced=False)
        by_ids = await requests(found, rounds, text=False)
        by_text = await requests(found, rounds, text=True)
        memory = await stalled(found)
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
        + f"\n## Clients that stop reading\n\n{memory}"
        + f"\n## Beside SMG\n\n{beside_smg(smg, fast, paced, by_text)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--before", type=Path, help="another checkout, whose router takes turns too")
    parser.add_argument("--smg", type=Path, help="the command that starts SMG: DIR/bin/smg of the package smg")
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if arguments.smg is None:
        print(f"bench-streaming: {NO_SMG}")
    elif not arguments.smg.is_file():
        parser.error(f"--smg: there is no {arguments.smg}")
    elif find_spec("smg_grpc_proto") is None:
        parser.error("--smg needs the package smg-grpc-proto of the extra trunkline[dev]")
    flags = ["--rounds", str(arguments.rounds), *(["--smg", "DIR/bin/smg"] if arguments.smg else [])]
    names = ("trunkline", "grpcio", "protobuf", "uvloop")
    found = facts(make_command("bench-streaming", flags), "shared by source, hop and client", names)
    text = (
        "# Streaming through one router process\n\n"
        + listed(found)
        + "- medians of the rounds\n\n"
        + asyncio.run(measure(arguments.rounds, arguments.before, arguments.smg))
    )
    print(text)
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / f"streaming-{found['date']}.md").write_text(text)


if __name__ == "__main__":
    main()
