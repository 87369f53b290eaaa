"""`make bench-aiperf`: aiperf, unmodified, against the HTTP port of a router before one worker with the demo model.

Fails if a request fails, if an answer is not whole, or if a cancelled request does not end so at the router.
"""

import argparse
import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from trunkline_bench.http_load.hub_cache import write_hub_cache
from trunkline_bench.http_load.report import report
from trunkline_bench.http_load.runs import RUNS, LoadRun
from trunkline_bench.http_load.summary import Summary, cancelled_and_errors, cells, excerpt, faults
from trunkline_bench.reports.provenance import facts
from trunkline_bench.servers.demo_model import DEMO_MODEL
from trunkline_bench.servers.http_stack import http_stack, log_ends, wait_for_completion

REPOSITORY = Path(__file__).parents[3]
NAME = "trunkline/tiny-tales"
RUN_TIMEOUT_S = 300.0
SHOWN_CHARACTERS = 3000
SUMMARY = "profile_export_aiperf.json"
CANCELLED_IN_LOG = '"outcome": "cancelled"'


def summary_of(aiperf: Path, run: LoadRun, url: str, seed: int, folder: Path) -> Summary:
    """Runs aiperf. Raises RuntimeError if it fails, TimeoutExpired after RUN_TIMEOUT_S."""
    artifacts = folder / f"run-{seed}"
    done = subprocess.run(
        [str(aiperf), *run.arguments(url, NAME, seed, str(artifacts))],
        env=os.environ | {"HF_HOME": str(folder / "hub-home"), "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=RUN_TIMEOUT_S,
    )
    if done.returncode:
        raise RuntimeError(f"aiperf ended with status {done.returncode}:\n{done.stdout[-SHOWN_CHARACTERS:]}")
    return excerpt(json.loads((artifacts / SUMMARY).read_text()))


def measure(aiperf: Path, runs: Sequence[LoadRun], threads: int, folder: Path) -> list[Summary]:
    """One summary per run. Raises SystemExit if anything failed; it finishes the other runs if it can."""
    write_hub_cache(folder / "hub-home", NAME, DEMO_MODEL)
    summaries, wrong = list[Summary](), list[str]()
    with http_stack(DEMO_MODEL, NAME, folder, (f"--threads={threads}",)) as url:
        try:
            wait_for_completion(url, NAME)
            for seed, run in enumerate(runs, start=1):  # so no run has another one's prompts
                summary = summary_of(aiperf, run, url, seed, folder)
                print(f"  {run.title}: {' | '.join(cells(summary))}", flush=True)
                summaries.append(summary)
                wrong += [f"{run.title}: {fault}" for fault in faults(run, summary)]
        except (RuntimeError, TimeoutError, subprocess.TimeoutExpired) as error:
            raise SystemExit(f"bench-aiperf: {error}\n{log_ends(folder)}") from error
    cancelled = sum(cancelled_and_errors(summary)[0] for summary in summaries)
    ended = (folder / "router.log").read_text().count(CANCELLED_IN_LOG)
    if ended != cancelled:
        wrong.append(f"aiperf cancelled {cancelled} requests, but {ended} ended so at the router")
    if wrong:
        raise SystemExit("\n".join(f"bench-aiperf: {fault}" for fault in wrong))
    return summaries


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--aiperf", type=Path, required=True, help="the command, in an environment of its own")
    parser.add_argument("--share", type=float, default=1.0, help="share of the requests, for a short trial")
    parser.add_argument("--threads", type=int, default=1, help="of the worker; the client needs cores too")
    parser.add_argument("--output", type=Path, default=REPOSITORY / "bench" / "results")
    arguments = parser.parse_args()
    if not arguments.aiperf.is_file():
        raise SystemExit(f"bench-aiperf: {arguments.aiperf} does not exist")
    command = f"make bench-aiperf ARGS='--share {arguments.share} --threads {arguments.threads}'"
    found = facts(command, "shared by client, router and worker", ("trunkline", "torch"))
    runs = [run.shortened(arguments.share) for run in RUNS]
    with tempfile.TemporaryDirectory() as folder:
        summaries = measure(arguments.aiperf.absolute(), runs, arguments.threads, Path(folder))
    found["versions"] += f", aiperf {summaries[0]['aiperf_version']}"
    text = report(runs, summaries, found, arguments.threads)
    arguments.output.mkdir(parents=True, exist_ok=True)
    stem = arguments.output / f"aiperf-{found['date']}"
    stem.with_suffix(".md").write_text(text)
    kept = [json.dumps({"run": run.title, **summary}) for run, summary in zip(runs, summaries, strict=True)]
    stem.with_suffix(".json").write_text("[\n" + ",\n".join(kept) + "\n]\n")
    print(text)


if __name__ == "__main__":
    main()
