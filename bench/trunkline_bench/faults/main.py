"""`make bench-faults`: accidents in a fleet of real processes under load, as its clients see them.

Three workers run the demo model, each behind a TCP proxy that stands for the network. Fifty concurrent streams, greedy
and sampled, some with stop strings, log-probabilities, penalties or two choices, run once without an accident and then
once with each accident. With --deterministic every stream must be bit-identical to the run without an accident. Fifty
more run over HTTP: completions, chat completions, messages and responses.
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

from trunkline.sampling_params import MAX_TOP_LOGPROBS
from trunkline_bench.faults.fleet import running_fleet
from trunkline_bench.faults.http_accidents import running_http_fleet, struck_over_http, undisturbed_over_http
from trunkline_bench.faults.http_streams import http_orders
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
    "greedy streams that diverge",
    "gap there, median / largest",
    "sampled streams that diverge",
    "gap there, median / largest",
    "diverged without a near tie",
    "recovery, median / longest",
)
KERNELS = {
    "auto": "With the default kernels of a CPU (`--kernels=auto`):",
    "torch": "With plain PyTorch (`--kernels=torch`), whose matrix products depend more on the batch:",
}
HTTP_ACCIDENTS = ("kill -9 of an engine", "kill -9 of a front")
ROUTER_FLAGS = (f"--inter-token-timeout-s={INTER_TOKEN_TIMEOUT_S:g}",)

Rows = dict[str, list[str]]


def worker_flags(*, deterministic: bool, drain_timeout_s: float = 1.0) -> tuple[str, ...]:
    kind = ("--dtype=float32", "--deterministic") if deterministic else ("--dtype=bfloat16",)
    return (*kind, "--kv-blocks=3000", f"--drain-timeout-s={drain_timeout_s:g}")


def poison_environment(deadly_step: int = 1) -> dict[str, str]:
    """Environment for workers whose engines die of the prompt POISON, at its step number `deadly_step`."""
    return {"PYTHONPATH": str(POISON_FOLDER), "TRUNKLINE_DEADLY_STEP": str(deadly_step)}


@contextmanager
def quotas_of_all() -> Iterator[Path]:
    """A tenants file that gives every tenant quotas too large to exhaust, so that each request reserves in Redis."""
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
    """Adds a row per accident. Returns whether every stream was as expected."""
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


async def with_accidents_over_http(rows: Rows) -> bool:
    """Adds rows. Returns whether no stream over HTTP was broken, and each had its text."""
    clean, wanted = True, http_orders(STREAMS, tokens=TOKENS)
    async with running_http_fleet(DEMO_MODEL, *worker_flags(deterministic=True)) as (fleet, port):
        expected = await undisturbed_over_http(port, wanted)
        for accident in HTTP_ACCIDENTS:
            outcome = await struck_over_http(fleet, port, wanted, expected, ACCIDENTS[accident])
            clean &= outcome.is_clean and outcome.resumed > 0
            name = f"over HTTP: {accident}"
            rows[name] = row(outcome)
            say(name, rows[name])
    return clean


async def with_a_router_killed(rows: Rows, wanted: Sequence[Order]) -> bool:
    """Adds a row. Returns whether only the killed router's streams failed, with UNAVAILABLE, and retries succeeded."""
    async with running_fleet(DEMO_MODEL, *worker_flags(deterministic=True), routers=2) as fleet:
        expected = await undisturbed(fleet, wanted)
        outcome, loss = await router_killed(fleet, wanted, expected)
    name = f"one of two routers killed, failed streams retried; {loss}"
    rows[name] = row(outcome)
    say(name, rows[name])
    return outcome.is_clean and loss.is_contained


async def with_poison(rows: Rows, wanted: Sequence[Order]) -> bool:
    """Adds a row. Returns whether the poison cost at most two workers and affected no other stream."""
    poison = Order([*POISON, 5, 6, 7], {"max_tokens": 20, "seed": 1})
    async with running_fleet(DEMO_MODEL, *worker_flags(deterministic=True), environment=poison_environment()) as fleet:
        expected = await undisturbed(fleet, wanted)
        outcome, sick, lost = await poisoned(fleet, wanted, expected, poison)
    name = f"a request that kills engines: {sick.error}, again {sick.asked_again}; {lost} workers lost"
    rows[name] = row(outcome)
    say(name, rows[name])
    return outcome.is_clean and sick.error == sick.asked_again == "Quarantined" and lost <= 2


async def with_redis_lost(rows: Rows, wanted: Sequence[Order]) -> bool:
    """Adds rows. Returns whether no request was affected by the loss of Redis, where each reserves its quotas."""
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
                name += f"; TTFT with Redis {median(ttft_s):.2f} / {ttft_s[-1]:.2f} s"
                rows[name] = row(outcome)
                say(name, rows[name])
    return clean


async def with_near_ties(rows: Rows, wanted: Sequence[Order], kernels: str) -> bool:
    """Adds rows for the accidents in bfloat16, without --deterministic. Returns whether only near ties changed."""
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
    """Cells with the number of greedy (or sampled) streams that diverge, and their gaps."""
    comparable = sum(order.is_greedy == greedy and is_comparable(order) for order in wanted)
    mine = [parting for parting in parted if wanted[parting.stream].is_greedy == greedy]
    gaps = sorted(abs(parting.gap) for parting in mine if parting.gap is not None)
    count = len({parting.stream for parting in mine})
    return [f"{count} of {comparable}", f"{median(gaps):.4f} / {gaps[-1]:.4f}" if gaps else "—"]


def say(name: str, cells: Sequence[str]) -> None:
    print(f"{name}: {' | '.join(cells)}", file=sys.stderr, flush=True)


async def measure() -> tuple[str, bool]:
    """Returns the report, and whether all streams were as expected."""
    wanted = orders(STREAMS, tokens=TOKENS)
    # Taken before the runs, which last minutes: the code may change meanwhile.
    found = facts("make bench-faults", "shared by workers, routers and clients", PACKAGES)
    found["versions"] += f", redis-server {newest_version()}"
    exact: Rows = {}
    ties: dict[str, Rows] = {kernels: {} for kernels in KERNELS}
    clean = await with_accidents(exact, wanted)
    clean &= await with_accidents_over_http(exact)
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
        f"Recovery: the longest silence of each stream that was resumed. Here a worker counts as hung if it sends "
        f"nothing for {INTER_TOKEN_TIMEOUT_S:g} s plus the time of three of its largest steps. For an accident to "
        "Redis, recovery is the time to first token of requests that began without Redis. After each accident no "
        "worker held live KV blocks.",
        "",
        "## float32, --deterministic: bit by bit against the run without an accident",
        "",
        table(exact, COLUMNS, "accident"),
        "## bfloat16, not deterministic: where streams diverge, and how near the tie was",
        "",
        "The gap is between the scores of the two tokens at the first difference, in the run without an accident. The "
        "score of a greedy stream is the log-probability; that of a sampled stream is the log-probability divided by "
        "the temperature, plus the noise of the draw. Streams with penalties, top_k or a top_p below 1 are left out, "
        f"since their log-probabilities do not show how near the tie was. A gap of up to {NEAR:g} counts as a near "
        "tie. Batches differ from run to run, so streams may diverge without any accident.",
        "",
        *(line for kernels, rows in ties.items() for line in (KERNELS[kernels], "", table(rows, TIES, "accident"))),
    ]
    return "\n".join(lines), clean


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, help="file for the report; default: standard output")
    arguments = parser.parse_args()
    report, clean = asyncio.run(measure())
    if arguments.output:
        arguments.output.write_text(report)
    else:
        print(report)
    return 0 if clean else 1


if __name__ == "__main__":
    sys.exit(main())
