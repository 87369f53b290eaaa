"""What aiperf's summary of a run says: the row of the report, and what went wrong."""

from collections.abc import Mapping
from typing import Any

from trunkline_bench.http_load.runs import OUTPUT_TOKENS, LoadRun

Summary = Mapping[str, Any]  # JSON, as aiperf writes it

COLUMNS = (
    "requests", "TTFT p50, ms", "p99", "ITL p50, ms", "p99", "latency p50, ms", "p99", "output tok/s",
    "requests/s", "cached prompt, %", "cancelled", "errors",
)  # fmt: skip
TEXT_SLACK = 2  # A text may become more or fewer tokens than it was made of.
CANCELLED = "RequestCancellationError"
STATISTICS = ("unit", "avg", "p50", "p90", "p99", "min", "max", "count")
METRICS = (
    "request_count", "completed_request_count", "error_request_count", "time_to_first_token", "inter_token_latency",
    "inter_chunk_latency", "request_latency", "request_throughput", "output_token_throughput", "output_sequence_length",
    "input_sequence_length", "usage_prompt_tokens", "usage_completion_tokens", "overall_usage_prompt_cache_read_pct",
    "usage_discrepancy_count", "osl_mismatch_count", "benchmark_duration",
)  # fmt: skip
STATES = ("aiperf_version", "is_complete", "was_cancelled", "error_summary")


def excerpt(summary: Summary) -> dict[str, Any]:
    """The part of a summary that the report keeps, its figures rounded to three places."""
    kept: dict[str, Any] = {name: summary[name] for name in STATES if name in summary}
    for name in METRICS:
        if name in summary:
            kept[name] = {
                key: round(value, 3) if isinstance(value, float) else value
                for key, value in summary[name].items()
                if key in STATISTICS
            }
    return kept


def cells(summary: Summary) -> list[str]:
    """The row of a run, by COLUMNS. "—": aiperf does not tell."""
    cancelled, errors = cancelled_and_errors(summary)
    return [
        _figure(summary, "completed_request_count", "avg"),
        *(
            _figure(summary, metric, statistic, ".1f")
            for metric in ("time_to_first_token", "inter_token_latency", "request_latency")
            for statistic in ("p50", "p99")
        ),
        _figure(summary, "output_token_throughput", "avg"),
        _figure(summary, "request_throughput", "avg", ".1f"),
        _figure(summary, "overall_usage_prompt_cache_read_pct", "avg"),
        str(cancelled),
        str(errors),
    ]


def cancelled_and_errors(summary: Summary) -> tuple[int, int]:
    """Requests that aiperf cancelled, and those that failed."""
    cancelled = sum(error["count"] for error in summary.get("error_summary", ()) if _is_cancellation(error))
    return cancelled, _count(summary, "error_request_count") - cancelled


def faults(run: LoadRun, summary: Summary) -> list[str]:
    """What should not be in a summary, one clause each.

    aiperf counts an answer that ends early as a success, so lengths are compared too.
    """
    cancelled, errors = cancelled_and_errors(summary)
    found = [f"error: {error}" for error in summary.get("error_summary", ()) if not _is_cancellation(error)]
    if not summary.get("is_complete") or summary.get("was_cancelled"):
        found.append("aiperf did not complete")
    if (ended := _count(summary, "completed_request_count")) != run.requests:
        found.append(f"{ended} requests instead of {run.requests}")
    if bool(cancelled) != run.cancels:
        found.append(f"{cancelled} requests were cancelled")
    answered = run.requests - cancelled - errors
    usage = summary.get("usage_completion_tokens", {})
    if run.counts_usage and usage.get("count") != answered:
        found.append(f"{usage.get('count', 0)} of {answered} answers have a usage")
    lengths, slack = (usage, 0) if run.counts_usage else (summary.get("output_sequence_length", {}), TEXT_SLACK)
    least, most = lengths.get("min", 0), lengths.get("max", 0)
    if run.is_whole and max(OUTPUT_TOKENS - least, most - OUTPUT_TOKENS) > slack:
        found.append(f"answers have {least:.0f} to {most:.0f} tokens instead of {OUTPUT_TOKENS}")
    return found


def _is_cancellation(error: Mapping[str, Any]) -> bool:
    return bool(error["error_details"]["type"] == CANCELLED)


def _count(summary: Summary, metric: str) -> int:
    return int(summary[metric]["avg"]) if metric in summary else 0


def _figure(summary: Summary, metric: str, statistic: str, form: str = ".0f") -> str:
    value = summary.get(metric, {}).get(statistic)
    return "—" if value is None else f"{value:,{form}}"
