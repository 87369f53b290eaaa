"""`make bench-attacks`: how hostile and careless neighbours affect a real cluster and another tenant.

usage: python -m trunkline_bench.attacks.main [--only TEXT] [--seconds 3] [--model deploy/demo/tiny-tales]

Prints a row for each attack as soon as it is measured. Exits with status 1 if a bound did not hold.
"""

import argparse
import asyncio
import contextlib
import signal
import sys
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from trunkline.errors import TrunklineError
from trunkline_bench.attacks.attack_result import (
    HEAD,
    MAX_KEPT_MIB,
    MAX_LATER_MS,
    MAX_OWN_LAG_MS,
    MAX_P99_MS,
    MAX_RSS_MIB,
    MORE_THAN_ALONE_MS,
    TIMES_ALONE,
    AttackResult,
)
from trunkline_bench.attacks.attacked_cluster import AttackedCluster, attacked_cluster
from trunkline_bench.attacks.catalogue import NONE, Case, Section, cases
from trunkline_bench.attacks.vectors.priority import NICE
from trunkline_bench.attacks.window import ENOUGH, HOLD_S, MOST_S, Window
from trunkline_bench.faults.fleet import FleetError
from trunkline_bench.reports.markdown import listed
from trunkline_bench.reports.provenance import facts, make_command
from trunkline_bench.servers.demo_model import DEMO_MODEL

RESULTS = Path(__file__).parents[2] / "results"
INTRODUCTION = f"""
Another tenant, the innocent one, sends requests all the time, one after another. They carry text and ask for one token
unless the row says otherwise. The router is started anew for every attack.

The attacker is a process of its own. It shares the cores with its victims and has a low scheduling priority (nice
{NICE}, a tenth of their weight), because an attacker on another machine would take no core from them. An attack lasts
until {ENOUGH} requests of the innocent have ended, at most {MOST_S:g} s. An attack that strikes once and then holds
its connections or streams open lasts {HOLD_S:g} s. The bounds:

- No request of the innocent fails, and the p99 of its first tokens stays under {MAX_P99_MS:g} ms. If the attack is
  legal work for the same worker, it stays under the larger of {TIMES_ALONE:g} times the p99 without an attack and
  {MORE_THAN_ALONE_MS:g} ms more. Answers of 16 tokens take at most {MAX_LATER_MS:g} ms for each later token: the target for the inter-token latency.
- The attacked process takes less than {MAX_RSS_MIB:g} MiB, and three seconds later at most {MAX_KEPT_MIB:g} MiB more
  than before.
- Its event loop lags less than {MAX_OWN_LAG_MS:g} ms, not counting the time in which it waits for a core.
"""  # noqa: E501


async def run(model: Path, wanted: Sequence[Case], seconds: float, say: Callable[[str], None]) -> list[str]:
    """Runs the attacks. Returns a line for each one that broke a bound."""
    missed: list[str] = []
    alone_ms: dict[str, float] = {}  # by the kind of request
    for section in Section:
        waiting = deque(case for case in wanted if case.section is section)
        if waiting:
            say(f"\n## {section.value}\n\n{HEAD}")
        while waiting:
            async with attacked_cluster(section, model) as cluster:
                result = None
                while waiting and (result is None or not result.failure):  # after a failure, new workers
                    case = waiting.popleft()
                    result = await _result(cluster, case, case.window(seconds), alone_ms.get(case.asks, 0.0))
                    if case.attack == NONE:
                        alone_ms[case.asks] = result.record.p99_ms
                    say(result.markdown())
                    if misses := result.misses():
                        missed.append(f"{case.name}: {'; '.join(misses)}")
    return missed


async def _result(cluster: AttackedCluster, case: Case, window: Window, alone_ms: float) -> AttackResult:
    """The result of an attack, or a result with the reason why there is none."""
    try:
        return await cluster.run(case, window, alone_ms)
    except (FleetError, TrunklineError) as error:
        return AttackResult(case.name, case.bounds, failure=f"the cluster broke: {error}")


def chosen(text: str) -> list[Case]:
    """The attacks whose name or section contains `text`, and the runs without an attack that they are compared with."""
    text = text.lower()
    named = [case for case in cases() if case.attack != NONE and text in f"{case.section.value} {case.name}".lower()]
    compared = {(case.section, case.asks) for case in named if case.is_beside_others}
    return [case for case in cases() if case in named or (case.attack == NONE and (
        not text or (case.section, case.asks) in compared))]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="run attacks whose name or section contains this")
    parser.add_argument("--seconds", type=float, default=3.0, help="least duration of an attack")
    parser.add_argument(
        "--model", type=Path, default=DEMO_MODEL, help="a model with a context of at least 1,000 tokens"
    )
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    wanted = chosen(arguments.only)
    if not wanted:
        parser.error(f"--only={arguments.only}: no attack has this in its name or section")
    flags = [f"--only={arguments.only}"] if arguments.only else []
    command = make_command("bench-attacks", [*flags, f"--seconds={arguments.seconds:g}"])
    found = facts(command, "shared by workers, router, attacker and clients", ("trunkline", "grpcio", "tokenizers"))
    arguments.output.mkdir(parents=True, exist_ok=True)
    with (arguments.output / f"attacks-{found['date']}.md").open("w") as file:

        def say(text: str) -> None:
            print(text, flush=True)
            file.write(text + "\n")
            file.flush()

        say(f"# Attacks on a cluster\n\n{listed(found)}{INTRODUCTION}")
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that its servers end too
        with contextlib.suppress(KeyboardInterrupt):
            missed = asyncio.run(run(arguments.model.resolve(), wanted, arguments.seconds, say))
            say(f"\n{len(missed)} of {len(wanted)} rows missed a bound." + "".join(f"\n- {line}" for line in missed))
            sys.exit(bool(missed))


if __name__ == "__main__":
    main()
