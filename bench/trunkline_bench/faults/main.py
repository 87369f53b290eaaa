"""`make bench-faults`: accidents that happen to a fleet of real processes under load, and what its clients notice.

Three workers with the demo model, each behind a TCP proxy that stands for the network. Fifty streams at once, greedy
and sampled, some with stop strings, log-probabilities, penalties or two choices, run once without an accident and then
once with each. Under --deterministic every stream must be, to the bit, what it was.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

from trunkline.validation import MAX_TOP_LOGPROBS
from trunkline_bench.faults.fleet import running_fleet
from trunkline_bench.faults.near_ties import NEAR, Parting, contradictions, is_comparable, partings
from trunkline_bench.faults.poison.sitecustomize import POISON
from trunkline_bench.faults.scenarios import (
    ACCIDENTS,
    Outcome,
    compare,
    poisoned,
    redis_lost,
    router_killed,
    struck,
    undisturbed,
)
from trunkline_bench.faults.streams import Order, orders
from trunkline_bench.reports.markdown import listed, table
from trunkline_bench.reports.provenance import facts
from trunkline_bench.servers.demo_model import DEMO_MODEL
from trunkline_bench.servers.redis_server import RedisServer, newest_version

STREAMS = 50
TOKENS = (100, 300)
INTER_TOKEN_TIMEOUT_S = 2.0
POISON_FOLDER = Path(__file__).parent / "poison"
COLUMNS = ("streams", "resumed", "tokens", "errors", "differing", "lost or repeated", "recovery, median / longest")
PACKAGES = ("trunkline", "torch", "grpcio", "protobuf")
TIES = (
    "errors",
    "lost or repeated",
    "greedy streams that part",
    "gap there, median / largest",
    "sampled streams that part",
    "gap there, median / largest",
    "parted at no near tie",
    "recovery, median / longest",
)
KERNELS = {
    "auto": "With the kernels that a CPU gets (`--kernels=auto`):",
    "torch": "With plain PyTorch (`--kernels=torch`), whose products depend more on the batch:",
}
ROUTER_FLAGS = (f"--inter-token-timeout-s={INTER_TOKEN_TIMEOUT_S:g}",)

Rows = dict[str, list[str]]


def worker_flags(*, deterministic: bool, drain_timeout_s: float = 1.0) -> tuple[str, ...]:
    kind = ("--dtype=float32", "--deterministic") if deterministic else ("--dtype=bfloat16",)
    return (*kind, "--kv-blocks=3000", f"--drain-timeout-s={drain_timeout_s:g}")


def poison_environment(deadly_step: int = 1) -> dict[str, str]:
    """For workers: their engines die of POISON, in this step of it."""
    return {"PYTHONPATH": str(POISON_FOLDER), "TRUNKLINE_DEADLY_STEP": str(deadly_step)}


@contextmanager
def quotas_of_all() -> Iterator[Path]:
    """A file of tenants: everybody has quotas, so that Redis is asked for each request, and nobody uses them up."""
    most = {"requests_per_minute": 10**6, "tokens_per_minute": 10**8, "tokens_in_flight": 10**7}
    with tempfile.TemporaryDirectory() as folder:
        tenants = Path(folder) / "tenants.json"
        tenants.write_text(json.dumps({"*": most}))
        yield tenants


def row(outcome: Outcome) -> list[str]:
    counts = (len(outcome.records), outcome.resumed, outcome.tokens)
    bad = (len(outcome.errors), len(outcome.differing), len(outcome.seams))
    return [f"{number:,}" for number in (*counts, *bad)] + [outcome.recovery()]


async def with_accidents(rows: Rows, wanted: Sequence[Order]) -> bool:
    """Whether every stream was what it should be, whatever happened."""
    clean = True
    flags = worker_flags(deterministic=True)
    async with running_fleet(DEMO_MODEL, *flags, router_arguments=ROUTER_FLAGS) as fleet:
        expected = await undisturbed(fleet, wanted)
        for name, accident in ACCIDENTS.items():
            outcome = await struck(fleet, wanted, expected, accident)
            clean &= outcome.is_clean and outcome.resumed > 0
            rows[name] = row(outcome)
            say(name, rows[name])
    return clean


async def with_a_router_killed(rows: Rows, wanted: Sequence[Order]) -> bool:
    """Whether only the killed router's streams saw an error, UNAVAILABLE, and asked anew came out as they should."""
    async with running_fleet(DEMO_MODEL, *worker_flags(deterministic=True), routers=2) as fleet:
        expected = await undisturbed(fleet, wanted)
        outcome, loss = await router_killed(fleet, wanted, expected)
    name = f"one of two routers killed, who sees an error asks again; {loss}"
    rows[name] = row(outcome)
    say(name, rows[name])
    return outcome.is_clean and loss.is_contained


async def with_poison(rows: Rows, wanted: Sequence[Order]) -> bool:
    """Whether the poison cost two workers at most, and nobody else anything."""
    poison = Order([*POISON, 5, 6, 7], {"max_tokens": 20, "seed": 1})
    async with running_fleet(DEMO_MODEL, *worker_flags(deterministic=True), environment=poison_environment()) as fleet:
        expected = await undisturbed(fleet, wanted)
        outcome, sick, lost = await poisoned(fleet, wanted, expected, poison)
    name = f"a request that kills engines: {sick.error}, again {sick.asked_again}; {lost} workers lost"
    rows[name] = row(outcome)
    say(name, rows[name])
    return outcome.is_clean and sick.error == sick.asked_again == "Quarantined" and lost <= 2


async def with_redis_lost(rows: Rows, wanted: Sequence[Order]) -> bool:
    """Whether no request noticed that Redis was away, though each asks for its tenant's quotas there."""
    clean = True
    with RedisServer() as redis, quotas_of_all() as tenants:
        flags = (*ROUTER_FLAGS, f"--redis-url={redis.url}", f"--tenants={tenants}")
        workers = worker_flags(deterministic=True)
        async with running_fleet(DEMO_MODEL, *workers, routers=2, router_arguments=flags) as fleet:
            expected = await undisturbed(fleet, wanted)
            ttft_s = sorted(record.ttft_s for record in expected)
            say("time to first token with Redis", [f"{median(ttft_s):.2f} / {ttft_s[-1]:.2f} s"])
            accidents = {
                "Redis killed, back empty": (redis.kill, redis.start),
                "Redis stopped (SIGSTOP), continued later": (redis.hang, redis.go_on),
            }
            for name, (lose, find) in accidents.items():
                outcome = await redis_lost(fleet, wanted, expected, lose, find)
                clean &= outcome.is_clean
                name += f"; TTFT, with it {median(ttft_s):.2f} / {ttft_s[-1]:.2f} s"
                rows[name] = row(outcome)
                say(name, rows[name])
    return clean


async def with_near_ties(rows: Rows, wanted: Sequence[Order], kernels: str) -> bool:
    """The accidents in bfloat16, without --deterministic: near ties may fall the other way, and nothing else."""
    wanted = [Order(o.prompt, {"top_p": 1.0} | o.options | {"logprobs": MAX_TOP_LOGPROBS}) for o in wanted]
    clean = True
    flags = (*worker_flags(deterministic=False), f"--kernels={kernels}")
    async with running_fleet(DEMO_MODEL, *flags, router_arguments=ROUTER_FLAGS) as fleet:
        expected = await undisturbed(fleet, wanted)
        for name, accident in {"no accident": None, **ACCIDENTS}.items():
            if accident is None:
                outcome = compare(await undisturbed(fleet, wanted), expected, 0.0)
            else:
                outcome = await struck(fleet, wanted, expected, accident)
            rounds = len(outcome.records) // len(wanted)
            parted = partings([*wanted] * rounds, outcome.records, [*expected] * rounds)
            contradicted = contradictions(outcome.records)
            clean &= not outcome.errors and not contradicted and all(parting.is_near_tie for parting in parted)
            rows[name] = [
                f"{len(outcome.errors)}",
                f"{len(contradicted)}",
                *parted_cells([*wanted] * rounds, parted, greedy=True),
                *parted_cells([*wanted] * rounds, parted, greedy=False),
                f"{sum(not parting.is_near_tie for parting in parted)}",
                outcome.recovery(),
            ]
            say(name, rows[name])
    return clean


def parted_cells(wanted: Sequence[Order], parted: Sequence[Parting], *, greedy: bool) -> list[str]:
    """How many of such streams part, and the gaps there."""
    comparable = sum(order.is_greedy == greedy and is_comparable(order) for order in wanted)
    mine = [parting for parting in parted if wanted[parting.stream].is_greedy == greedy]
    gaps = sorted(abs(parting.gap) for parting in mine if parting.gap is not None)
    count = len({parting.stream for parting in mine})
    return [f"{count} of {comparable}", f"{median(gaps):.4f} / {gaps[-1]:.4f}" if gaps else "—"]


def say(name: str, cells: Sequence[str]) -> None:
    print(f"{name}: {' | '.join(cells)}", file=sys.stderr, flush=True)


async def measure() -> tuple[str, bool]:
    """The report, and whether all is as it should be."""
    wanted = orders(STREAMS, tokens=TOKENS)
    # Before the runs, which take minutes: it is the code as it is now that they are of.
    found = facts("make bench-faults", "shared by workers, routers and clients", PACKAGES)
    found["versions"] += f", redis-server {newest_version()}"
    exact: Rows = {}
    ties: dict[str, Rows] = {kernels: {} for kernels in KERNELS}
    clean = await with_accidents(exact, wanted)
    clean &= await with_a_router_killed(exact, wanted)
    clean &= await with_poison(exact, wanted)
    clean &= await with_redis_lost(exact, wanted)
    for kernels, rows in ties.items():
        clean &= await with_near_ties(rows, wanted, kernels)
    lines = [
        f"# Accidents, {datetime.now(UTC):%Y-%m-%d}",
        "",
        listed(found),
        __doc__.partition("\n\n")[2].strip() if __doc__ else "",
        "",
        f"Recovery: the longest silence of each stream that was resumed. A worker that says nothing for "
        f"{INTER_TOKEN_TIMEOUT_S:g} s and the time of three of its largest steps is taken for hung here. Of an "
        "accident to Redis: the time to first token of requests that began without it. After each accident every "
        "worker's live KV was 0.",
        "",
        "## float32, --deterministic: against the run without accident, to the bit",
        "",
        table(exact, COLUMNS, "accident"),
        "## bfloat16, not deterministic: where streams part, and how near the tie was",
        "",
        "The gap is between the two tokens at the first place that differs, in the run without accident: between their "
        "log-probabilities where the likeliest is taken, and where one is drawn between these over the temperature, "
        "with the noise of the draw. Streams with penalties, top_k or a top_p below 1 are left out: their "
        f"log-probabilities do not tell how near it was. Up to {NEAR:g} counts as a near tie. Batches differ from run "
        "to run, so streams may part without any accident.",
        "",
        *(line for kernels, rows in ties.items() for line in (KERNELS[kernels], "", table(rows, TIES, "accident"))),
    ]
    return "\n".join(lines), clean


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, help="where to write the report; default: standard output")
    arguments = parser.parse_args()
    report, clean = asyncio.run(measure())
    if arguments.output:
        arguments.output.write_text(report)
    else:
        print(report)
    return 0 if clean else 1


if __name__ == "__main__":
    sys.exit(main())
