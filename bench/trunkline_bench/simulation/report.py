"""Runs as rows of a table."""

import math
import os
import platform
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from trunkline_bench.simulation.replay import Replayed


def percentile(values: list[float], share: float) -> float:
    """The nearest rank; NaN of nothing."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan


def ttfts(run: Replayed, lane: str | None = None) -> list[float]:
    return [
        outcome.ttft_s
        for outcome in run.outcomes
        if outcome.ttft_s is not None and (lane is None or outcome.request.lane == lane)
    ]


def e2es(run: Replayed) -> list[float]:
    return [
        outcome.done_s - outcome.request.arrival_s
        for outcome in run.outcomes
        if outcome.done_s is not None and not outcome.refused
    ]


def output_rate(run: Replayed) -> float:
    """Output tokens per second."""
    return sum(outcome.output_tokens for outcome in run.outcomes) / run.duration_s


COLUMNS = (
    "output tok/s", "TTFT p50 / p90 / p99, s", "ITL p50 / p99, ms", "E2E p50 / p99, s", "padding", "prefix hits",
    "preemptions", "refused",
)  # fmt: skip


def row(run: Replayed) -> list[str]:
    """One run, in the order of COLUMNS."""
    steps, first, whole = run.stats.steps, ttfts(run), e2es(run)
    computed = steps.prefill_tokens + steps.decode_tokens + steps.padding_tokens
    itl = max(run.stats.lanes, key=lambda lane: lane.itl_s.count).itl_s
    prompts = steps.prefill_tokens + steps.prefix_hit_tokens
    return [
        f"{output_rate(run):,.0f}",
        " / ".join(f"{percentile(first, share):.3g}" for share in (0.5, 0.9, 0.99)),
        f"{itl.p50 * 1e3:.1f} / {itl.p99 * 1e3:.1f}",
        " / ".join(f"{percentile(whole, share):.3g}" for share in (0.5, 0.99)),
        f"{steps.padding_tokens / computed:.0%}" if computed else "-",
        f"{steps.prefix_hit_tokens / prompts:.1%}" if prompts else "-",
        f"{steps.preemptions:,}",
        f"{sum(bool(outcome.refused) for outcome in run.outcomes):,}",
    ]


def table(rows: dict[str, list[str]], columns: tuple[str, ...] = COLUMNS, corner: str = "") -> str:
    """A Markdown table."""
    lines = [f"| {corner} | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    lines += [f"| {name} | " + " | ".join(cells) + " |" for name, cells in rows.items()]
    return "\n".join(lines) + "\n"


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def facts(command: str) -> str:
    """What a result needs to be repeated."""
    return (
        f"- date: {datetime.now(UTC):%Y-%m-%d}\n"
        f"- machine: {cpu_name()}, {len(os.sched_getaffinity(0))} cores (not the simulated device)\n"
        f"- versions: trunkline {version('trunkline')}, numpy {version('numpy')}, Python {platform.python_version()}\n"
        f"- command: `{command}`\n"
    )
