"""`make bench-observation`: what traces, metrics and a watcher cost a router and a worker.

Each is compared with one of which nothing is observed. Both take turns, and the reports have medians of pairs.
"""

import argparse
import asyncio
import sys
from collections.abc import Callable
from pathlib import Path

from trunkline_bench.observation import router_cost, worker_cost
from trunkline_bench.observation.cost_pairs import cost_table
from trunkline_bench.reports.markdown import listed
from trunkline_bench.reports.provenance import facts, make_command

RESULTS = Path(__file__).parents[2] / "results"
ROUTER, WORKER = "router", "worker"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=(ROUTER, WORKER), help="one of the two; without this flag, both")
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--requests", type=int, default=32, help="of a worker's run")
    parser.add_argument("--against", type=Path, help="checkout of what is not observed; without this flag, this one")
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    command = make_command("bench-observation", sys.argv[1:])
    if arguments.only != WORKER:
        report(arguments.output, ROUTER, command, lambda: of_router(arguments.pairs, arguments.against))
    if arguments.only != ROUTER:
        pairs, requests, against = arguments.pairs, arguments.requests, arguments.against
        report(arguments.output, WORKER, command, lambda: of_worker(pairs, requests, against))


def report(output: Path, name: str, command: str, measure: Callable[[], str]) -> None:
    """Measures, then prints and writes a report."""
    machine = "shared by source, routers, receiver and client" if name == ROUTER else "one thread for each engine"
    found = facts(command, machine, ("trunkline", "grpcio", "opentelemetry-sdk", "prometheus-client"))
    text = f"# What observation costs a {name}\n\n{listed(found)}{measure()}"
    print(text)
    output.mkdir(parents=True, exist_ok=True)
    (output / f"observation-{name}-{found['date']}.md").write_text(text)


def of_router(pairs: int, against: Path | None) -> str:
    """Measures; returns the report's list and table."""
    taken, observed = asyncio.run(router_cost.measured(pairs, against))
    return f"- {method(pairs, against)}\n- observed: {observed}\n\n{cost_table(taken)}"


def of_worker(pairs: int, requests: int, against: Path | None) -> str:
    """Measures; returns the report's list and table."""
    taken = asyncio.run(worker_cost.measured(pairs, requests, against))
    work = f"{requests} requests of {worker_cost.PROMPT} and {worker_cost.OUTPUT} tokens a run"
    return f"- {work}\n- {method(pairs, against)}\n\n{cost_table(taken)}"


def method(pairs: int, against: Path | None) -> str:
    other = "" if against is None else "; off is another checkout"
    return f"medians of {pairs} pairs of fresh processes, whose order alternates{other}"


if __name__ == "__main__":
    main()
