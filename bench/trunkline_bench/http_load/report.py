"""The report of all runs."""

from collections.abc import Sequence

from trunkline_bench.http_load.runs import (
    CANCELLED_AFTER_S,
    CANCELLED_PERCENT,
    OUTPUT_TOKENS,
    PROMPT_TOKENS,
    PROMPT_TOKENS_STDDEV,
    TURNS,
    LoadRun,
)
from trunkline_bench.http_load.summary import COLUMNS, Summary, cells
from trunkline_bench.reports.markdown import listed, table

NOTES = f"""\
- each request: streamed; a prompt of {PROMPT_TOKENS} tokens, standard deviation {PROMPT_TOKENS_STDDEV}, of aiperf's \
text; {OUTPUT_TOKENS} output tokens
- {TURNS} turns: each request repeats the conversation so far; answers end where the model ends them
- {CANCELLED_PERCENT} % cancelled: aiperf closes the connection after {CANCELLED_AFTER_S} s. These requests are not \
errors and have no latency
- all figures are aiperf's. It counts output tokens by their text, but those of messages by usage. "—": not reported
"""


def report(runs: Sequence[LoadRun], summaries: Sequence[Summary], found: dict[str, str], threads: int) -> str:
    """Markdown: where the figures come from, and a row per run."""
    rows = {run.title: cells(summary) for run, summary in zip(runs, summaries, strict=True)}
    return (
        "# Load over HTTP by aiperf\n\n"
        + listed(found)
        + f"- servers: one worker with the demo model and `--threads {threads}`, and one router\n"
        + NOTES
        + "\n"
        + table(rows, COLUMNS, "endpoint")
    )
