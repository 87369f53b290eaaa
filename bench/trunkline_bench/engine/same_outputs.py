"""`make bench-outputs ARGS='--before DIR'`: whether two checkouts of Trunkline give equal outputs, bit for bit.

Both run the same random configurations (random_runs.py) and the demo model on this CPU, from the same checkpoints.
Tokens, log-probabilities, cached tokens, reasons of ends and error codes are compared for equality.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trunkline_bench.engine import recorded_outputs
from trunkline_bench.engine.random_runs import golden_runs, random_run
from trunkline_bench.engine.recorded_outputs import Run
from trunkline_bench.reports.markdown import listed
from trunkline_bench.reports.provenance import commit, facts, make_command

REPOSITORY = Path(__file__).parents[3]
PACKAGES = ("protos", "kernels", "worker")
RANDOM_RUNS = 700
SHOWN = 20  # differences

Recorded = dict[str, Any]  # a recorded_outputs.Recorded and the seconds that its run took


def record(checkout: Path, runs: list[Run], processes: int) -> list[Recorded]:
    """What the packages of a checkout make of the runs, in their order."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(str(checkout / package) for package in PACKAGES),
        "OMP_NUM_THREADS": "1",
    }

    def share(index: int) -> list[Recorded]:
        lines = "".join(json.dumps(asdict(run)) + "\n" for run in runs[index::processes])
        command = [sys.executable, "-P", recorded_outputs.__file__, str(checkout)]
        done = subprocess.run(command, input=lines, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        return [json.loads(line) for line in done.stdout.splitlines()]

    with ThreadPoolExecutor(processes) as pool:
        shares = list(pool.map(share, range(processes)))
    return [shares[index % processes][index // processes] for index in range(len(runs))]


def difference(before: Recorded, now: Recorded) -> str | None:
    """The first difference between two records of one run; None: there is none."""
    if before["failure"] != now["failure"]:
        return f"{before['failure'] or 'it ran'} → {now['failure'] or 'it ran'}"
    for handle, output in before["outputs"].items():
        for name, value in output.items():
            other = now["outputs"][handle][name]
            if json.dumps(value) == json.dumps(other):  # NaN equals NaN
                continue
            if not isinstance(value, list) or not isinstance(other, list) or len(value) != len(other):
                return f"request {handle}: {name}: {value} → {other}"
            position = next(n for n, pair in enumerate(zip(value, other, strict=True)) if pair[0] != pair[1])
            return f"request {handle}: {name}[{position}]: {value[position]} → {other[position]}"
    return None


def covered(runs: list[Run], records: list[Recorded]) -> dict[str, str]:
    """What the runs had in them."""

    def counts(values: Iterable[str]) -> str:
        return ", ".join(f"{name} {count}" for name, count in sorted(Counter(values).items()))

    configs = [json.loads((Path(run.settings["model"]) / "config.json").read_text()) for run in runs]
    dtypes = [run.settings["dtype"] for run in runs]
    outputs = [output for record in records for output in record["outputs"].values()]
    return {
        "architectures": counts(config["model_type"] for config in configs),
        "dtypes": counts(
            config["dtype"] if dtype == "auto" else dtype for config, dtype in zip(configs, dtypes, strict=True)
        ),
        "kernels": counts({"auto": "C", "torch": "reference"}[run.settings["kernels"]] for run in runs),
        "deterministic": str(sum(run.settings["deterministic"] for run in runs)),
        "choices": f"{len(outputs):,}",
        "output tokens": f"{sum(len(output['tokens']) for output in outputs):,}",
        "positions with log-probabilities": f"{sum(len(output['logprobs']) for output in outputs):,} of outputs, "
        f"{sum(len(output['prompt_logprobs']) for output in outputs):,} of prompts",
        "cached tokens": f"{sum(output['cached'] or 0 for output in outputs):,}",
        "preemptions": f"{sum(record['preemptions'] for record in records):,}",
        "choices that ended in an error": str(sum(output["error"] is not None for output in outputs)),
        "engines that failed": counts(record["failure"] for record in records if record["failure"]) or "0",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, help="folder of the other checkout")
    parser.add_argument("--runs", type=int, default=RANDOM_RUNS, help="random configurations")
    parser.add_argument("--first", type=int, default=0, help="number of the first one, to repeat it alone")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    arguments = parser.parse_args()
    print(listed(facts(make_command("bench-outputs", sys.argv[1:]), "one thread a process", ("torch",))))
    before = arguments.before.resolve()
    with tempfile.TemporaryDirectory() as folder:
        numbers = range(arguments.first, arguments.first + arguments.runs)
        runs = [random_run(Path(folder) / str(number), seed=arguments.seed, index=number) for number in numbers]
        runs += golden_runs(REPOSITORY / "deploy" / "demo" / "tiny-tales")
        records = []
        for checkout in (before, REPOSITORY):
            started_s = time.perf_counter()
            records.append(record(checkout, runs, arguments.processes))
            print(f"- commit {commit(checkout)}: {len(runs)} configurations in {time.perf_counter() - started_s:.0f} s")
        print(listed(covered(runs, records[1])))
    found = [difference(*pair) for pair in zip(*records, strict=True)]
    different = [f"{run.name}: {text}" for run, text in zip(runs, found, strict=True) if text is not None]
    print("\n".join(different[:SHOWN]))
    print(f"{len(different)} of {len(runs)} configurations differ")
    sys.exit(bool(different))


if __name__ == "__main__":
    main()
