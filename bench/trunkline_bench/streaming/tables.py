"""The tables of the report: medians of the rounds."""

from pathlib import Path
from statistics import median

from trunkline_bench.reports.markdown import table
from trunkline_bench.streaming.processes import HTTP, ROUTER, Run
from trunkline_bench.streaming.smg import NOT_ALIKE, SMG, SMG_DIRECT, smg_version

REQUEST_STREAMS, REQUEST_ROUNDS = 64, 40
TOKENS = {64: 800, 256: 250}  # per stream, by the number of streams
STEPS_PER_S = 20.0
WHOLE = ", not streamed"  # in a row's name: the answer is one JSON object

Runs = dict[tuple[str, int], list[Run]]  # by hop and number of streams


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
    """Rows of requests; `of gRPC` is the median of each round's ratio to the router over gRPC."""
    rows = {}
    base = [request_cpu_s(one) for one in runs[ROUTER, REQUEST_STREAMS]]
    for (name, _), taken in runs.items():
        cpu_us = median(map(request_cpu_s, taken)) * 1e6
        rate = median(one.seen.requests / one.seen.seconds for one in taken)
        of_grpc = median(request_cpu_s(one) / of for one, of in zip(taken, base, strict=True))
        rows[f"{name}, {what}"] = [f"{rate:,.0f}", f"{cpu_us:.0f}", f"{1e6 / cpu_us:,.0f}", f"{of_grpc:.2f}"]
    return rows


def request_cpu_s(one: Run) -> float:
    return one.hop_cpu_s / one.seen.requests


REQUESTS = ("requests/s", "CPU µs per request", "requests/s per core", "CPU, of gRPC's")


def ours(runs: Runs) -> Runs:
    return {key: taken for key, taken in runs.items() if key[0] not in (SMG, SMG_DIRECT)}


def beside_smg(smg: Path | None, fast: Runs, paced: Runs, by_text: Runs) -> str:
    """The tables for router and SMG, each in front of its own source and relative to its own "direct"."""
    if smg is None:
        return NO_SMG + "\n"
    fast_rows, paced_rows = {}, {}
    for name, direct in ((ROUTER, "direct"), (HTTP, "direct"), (SMG, SMG_DIRECT)):
        for count in TOKENS:
            taken = fast[name, count]
            fast_rows[f"{name}, {count} streams"] = [f"{tokens_per_s(taken):,.0f}", *token_cells(taken)]
            (p50, p99), base = ages_ms(paced[name, count]), ages_ms(paced[direct, count])
            paced_rows[f"{name}, {count} streams"] = [
                *token_cells(paced[name, count]),
                f"{p50:.1f} / {p99:.1f}",
                f"{p50 - base[0]:+.1f} / {p99 - base[1]:+.1f}",
            ]
    requests_taken = {key: taken for key, taken in by_text.items() if key[0] in (ROUTER, HTTP, SMG)}
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
