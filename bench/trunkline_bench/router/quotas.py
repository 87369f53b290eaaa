"""`make bench-quotas`: two router processes and a real Redis, in front of workers without models. Measures how exactly
quotas hold across the fleet under load, what the calls to Redis cost, and how fair the fleet is to tenants that use
different routers.

usage: python -m trunkline_bench.router.quotas [--minutes 2] [--per-minute 6000] [--fair-seconds 40] [--users 8]
"""

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from trunkline.errors import error_of
from trunkline.names import TENANT_KEY
from trunkline.status import QUOTA_EXCEEDED
from trunkline.v1.generation_pb2 import SamplingParams
from trunkline.v1.inference_pb2 import GenerateRequest, ListModelsRequest, TokenIds
from trunkline.v1.inference_pb2_grpc import InferenceServiceStub
from trunkline_bench.reports.markdown import listed, table
from trunkline_bench.reports.provenance import facts, make_command
from trunkline_bench.reports.statistics import jain, percentile
from trunkline_bench.servers.ports import free_port
from trunkline_bench.servers.redis_server import RedisServer, newest_version

RESULTS = Path(__file__).parents[2] / "results"
PROMPT = list(range(10, 42))
OUTPUT = 8  # tokens
FAIR_OUTPUT = 64
PACE = 4000.0  # tokens per second of a worker, if workers are to be the bottleneck
TIMEOUT_S = 60.0
COOL_S = 0.02  # pause of a client after a refusal, far shorter than the retry hint
ROOMY = {"requests_per_minute": 10**9, "tokens_per_minute": 10**12, "tokens_in_flight": 10**12}


@dataclass(frozen=True, slots=True)
class Limited:
    """A tenant that sends far more than its quota."""

    quota: str
    limit: int
    output: int | None = OUTPUT  # max_tokens; None: not set, and answers vary

    @property
    def case(self) -> str:
        return self.quota.replace("_", " ") + ("" if self.output is not None else ", no max_tokens, outputs vary")


def limited_tenants(per_minute: int) -> dict[str, Limited]:
    """Tenants by name. Both kinds of quotas allow the same number of requests if all requests have OUTPUT tokens."""
    tokens = per_minute * (len(PROMPT) + OUTPUT)
    return {
        "requests": Limited("requests_per_minute", per_minute),
        "tokens": Limited("tokens_per_minute", tokens),
        "open-ended": Limited("tokens_per_minute", tokens, output=None),
    }


@dataclass(slots=True)
class Outcomes:
    """Outcomes of one tenant's requests."""

    answered: list[tuple[float, int]] = field(default_factory=list)  # (when sent, tokens used)
    times_s: list[float] = field(default_factory=list)  # of answered requests
    refused: int = 0
    other: list[str] = field(default_factory=list)


@contextmanager
def process(*command: str) -> Iterator[None]:
    running = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        running.terminate()
        running.wait()


@contextmanager
def fleet(workers: Sequence[tuple[str, float]], redis_url: str, per_minute: int = 1) -> Iterator[list[str]]:
    """Starts workers, given by model and pace, and two routers for all of them. Returns the routers' addresses."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        limits = {name: {tenant.quota: tenant.limit} for name, tenant in limited_tenants(per_minute).items()}
        (folder / "tenants.json").write_text(json.dumps({"roomy": ROOMY, **limits}))
        ports = [free_port() for _ in workers]
        for port, (model, rate) in zip(ports, workers, strict=True):
            module = (sys.executable, "-m", "trunkline_bench.router.paced_worker")
            stack.enter_context(process(*module, f"--port={port}", f"--model={model}", f"--rate={rate}"))
        routers = [free_port() for _ in range(2)]
        for port in routers:
            stack.enter_context(
                process(
                    sys.executable, "-m", "trunkline_router.main", f"--port={port}",
                    f"--workers={','.join(f'127.0.0.1:{worker}' for worker in ports)}",
                    f"--tenants={folder / 'tenants.json'}", *([f"--redis-url={redis_url}"] if redis_url else []),
                )
            )  # fmt: skip
        yield [f"127.0.0.1:{port}" for port in routers]


async def stubs_of(routers: Sequence[str], models: int, stack: AsyncExitStack) -> list[Any]:
    """Stubs of the routers, once each router serves all models."""
    stubs: list[Any] = []
    for address in routers:
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(address))
        stub: Any = InferenceServiceStub(channel)
        async with asyncio.timeout(TIMEOUT_S):
            while len((await stub.ListModels(ListModelsRequest(), wait_for_ready=True)).models) < models:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        stubs.append(stub)
    return stubs


async def ask(stub: Any, tenant: str, outcomes: Outcomes, *, model: str, output: int | None) -> None:
    """Sends one request. output: max_tokens, which the answer reaches; None: not set, and lengths vary."""
    sampling = SamplingParams(max_tokens=output)
    request = GenerateRequest(model=model, token_ids=TokenIds(ids=PROMPT), sampling=sampling)
    sent_s = time.monotonic()
    try:
        call = stub.Generate(request, metadata=((TENANT_KEY, tenant),), timeout=TIMEOUT_S)
        usage = None
        async for response in call:
            usage = response.usage
        assert usage is not None
        outcomes.answered.append((sent_s, usage.prompt_tokens + usage.completion_tokens))
        outcomes.times_s.append(time.monotonic() - sent_s)
    except grpc.aio.AioRpcError as error:
        if error_of(error).reason == QUOTA_EXCEEDED:
            outcomes.refused += 1
            await asyncio.sleep(COOL_S)
        else:
            outcomes.other.append(error.code().name)


async def closed_loop(
    stub: Any, tenant: str, outcomes: Outcomes, until_s: float, model: str, output: int | None
) -> None:
    while time.monotonic() < until_s:
        await ask(stub, tenant, outcomes, model=model, output=output)


def fullest_minute(answered: Sequence[tuple[float, int]], by_request: bool) -> int:
    """The largest number of answered requests, or of their tokens, that were sent within any 60 seconds."""
    ordered = sorted(answered)
    most = total = begin = 0
    for at_s, tokens in ordered:
        total += 1 if by_request else tokens
        while ordered[begin][0] <= at_s - 60:
            total -= 1 if by_request else ordered[begin][1]
            begin += 1
        most = max(most, total)
    return most


def busiest_second(answered: Sequence[tuple[float, int]]) -> int:
    """The largest number of answered requests that were sent within one second of the clock."""
    return max(Counter(int(at_s) for at_s, _ in answered).values())


async def measure_quotas(routers: Sequence[str], minutes: float, users: int, per_minute: int) -> dict[str, list[str]]:
    async with AsyncExitStack() as stack:
        stubs = await stubs_of(routers, 1, stack)
        tenants = limited_tenants(per_minute)
        found = {name: Outcomes() for name in tenants}
        until_s = time.monotonic() + 60 * minutes
        began_s = time.monotonic()
        await asyncio.gather(
            *(
                closed_loop(stubs[user % 2], name, found[name], until_s, "paced", tenant.output)
                for name, tenant in tenants.items()
                for user in range(users)
            )
        )
        seconds = time.monotonic() - began_s
    rows = {}
    for name, tenant in tenants.items():
        outcomes, limit = found[name], tenant.limit
        by_request = tenant.quota == "requests_per_minute"
        total = len(outcomes.answered) if by_request else sum(tokens for _, tokens in outcomes.answered)
        most = fullest_minute(outcomes.answered, by_request)
        rows[tenant.case] = [
            f"{limit:,}",
            f"{total:,}",
            f"{total / (limit * minutes) - 1:+.2%}",
            f"{most / limit - 1:+.2%}",
            f"{(len(outcomes.answered) + outcomes.refused) / seconds:,.0f}",
            f"{busiest_second(outcomes.answered):,}",
            f"{outcomes.refused:,}",
            ", ".join(f"{count} {code}" for code, count in Counter(outcomes.other).items()) or "0",
        ]
    return rows


async def measure_cost(routers: Sequence[str], seconds: float, users: int) -> dict[str, list[str]]:
    """Rows for a tenant far below its quotas and for a tenant without quotas, measured in turns."""
    async with AsyncExitStack() as stack:
        stubs = await stubs_of(routers, 1, stack)
        found = {"roomy": Outcomes(), "unlimited": Outcomes()}
        spent = dict.fromkeys(found, 0.0)
        for turn in range(8):
            tenant = ("roomy", "unlimited")[turn % 2]
            began_s = time.monotonic()
            until_s = began_s + seconds / 8
            await asyncio.gather(
                *(
                    closed_loop(stubs[user % 2], tenant, found[tenant], until_s, "paced", OUTPUT)
                    for user in range(users)
                )
            )
            spent[tenant] += time.monotonic() - began_s
    return {
        name: [
            f"{len(found[tenant].answered) / spent[tenant]:,.0f}",
            f"{percentile(found[tenant].times_s, 0.5) * 1e3:.2f} / {percentile(found[tenant].times_s, 0.99) * 1e3:.2f}",
            f"{len(found[tenant].other)}",
        ]
        for name, tenant in (("far below its quotas", "roomy"), ("without quotas", "unlimited"))
    }


async def measure_faults(
    routers: Sequence[str], redis: RedisServer, seconds: float, users: int
) -> dict[str, list[str]]:
    """Rows for a tenant far below its quotas while Redis runs, hangs, continues, is killed and restarts empty."""
    rows = {}
    stages = (
        ("running", lambda: None),
        ("stopped (SIGSTOP)", redis.hang),
        ("continued (SIGCONT)", redis.go_on),
        ("killed", redis.kill),
        ("restarted empty", redis.start),
    )
    async with AsyncExitStack() as stack:
        stubs = await stubs_of(routers, 1, stack)
        for name, act in stages:
            found = Outcomes()
            until_s = time.monotonic() + seconds
            loops = [
                asyncio.create_task(closed_loop(stubs[user % 2], "roomy", found, until_s, "paced", OUTPUT))
                for user in range(users)
            ]
            await asyncio.to_thread(act)
            await asyncio.gather(*loops)
            rows[name] = [
                f"{len(found.answered) / seconds:,.0f}",
                f"{percentile(found.times_s, 0.5) * 1e3:.2f}",
                f"{percentile(found.times_s, 0.99) * 1e3:.2f}",
                f"{max(found.times_s) * 1e3:.1f}",
                f"{found.refused + len(found.other)}",
            ]
    return rows


async def measure_fairness(routers: Sequence[str], seconds: float, users: int, both: bool) -> list[str]:
    """A row for tenant a at the first router and tenant b at the second. a has `users` concurrent requests at each
    model, b at one model or at both."""
    async with AsyncExitStack() as stack:
        stubs = await stubs_of(routers, 2, stack)
        found = {"a": Outcomes(), "b": Outcomes()}
        began_s = time.monotonic()
        until_s = began_s + seconds
        places = [("a", "one"), ("a", "two"), ("b", "one"), *([("b", "two")] if both else [])]
        await asyncio.gather(
            *(
                closed_loop(stubs["ab".index(tenant)], tenant, found[tenant], until_s, model, FAIR_OUTPUT)
                for tenant, model in places
                for _ in range(users)
            )
        )
    first_half_s = began_s + seconds / 2
    got = [
        sum(tokens for sent_s, tokens in outcomes.answered if sent_s >= first_half_s) / (seconds / 2)
        for outcomes in found.values()
    ]
    errors = sum(len(outcomes.other) for outcomes in found.values())
    return [f"{got[0]:,.0f}", f"{got[1]:,.0f}", f"{jain(got):.3f}", str(errors)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--per-minute", type=int, default=6000, help="requests per minute that the quotas allow")
    parser.add_argument("--fair-seconds", type=float, default=40.0)
    parser.add_argument("--users", type=int, default=8)
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    given = {"minutes": arguments.minutes, "per-minute": arguments.per_minute, "fair-seconds": arguments.fair_seconds}
    flags = [(f"--{name}", f"{value:g}") for name, value in {**given, "users": arguments.users}.items()]
    command = make_command("bench-quotas", [part for flag in flags for part in flag])
    found = facts(command, "shared by routers, Redis, workers and clients", ("trunkline", "grpcio", "redis"))
    found["versions"] += f", redis-server {newest_version()}"
    fast = [("paced", 0.0), ("paced", 0.0)]
    slow = [("one", PACE), ("two", PACE)]
    fair: dict[str, list[str]] = {}
    with RedisServer() as redis:
        with fleet(fast, redis.url, arguments.per_minute) as routers:
            measuring = measure_quotas(routers, arguments.minutes, arguments.users, arguments.per_minute)
            quotas = asyncio.run(measuring)
        with fleet(fast, redis.url) as routers:
            cost = asyncio.run(measure_cost(routers, arguments.fair_seconds / 2, arguments.users))
        with fleet(fast, redis.url) as routers:
            faults = asyncio.run(measure_faults(routers, redis, arguments.fair_seconds / 10, arguments.users))
        for case, both in (("b uses both workers", True), ("b uses one of the workers", False)):
            for sharing, url in (("routers share Redis", redis.url), ("routers without Redis", "")):
                with fleet(slow, url) as routers:
                    run = measure_fairness(routers, arguments.fair_seconds, arguments.users, both)
                    fair[f"{case}, {sharing}"] = asyncio.run(run)
    text = (
        "# Quotas and fairness over two routers\n\n"
        + listed(found)
        + "- two router processes, one Redis, two workers without models, this client; "
        f"{arguments.users} requests of each tenant at once, prompts of {len(PROMPT)} tokens\n\n"
        "## Quotas, each tenant far above its own\n\n"
        "Windows slide: the whole quota is available at the start, and again as usage leaves the window. Errors are "
        "those of the total usage, and of the 60 seconds with the highest usage.\n\n"
        + table(
            quotas,
            (
                "quota",
                "used",
                "error",
                "fullest minute",
                "requests/s sent",
                "answered in the busiest second",
                "refused",
                "other errors",
            ),
        )
        + "\n## Cost of calls to Redis\n\n"
        + table(cost, ("requests/s", "E2E p50 / p99, ms", "errors"))
        + "\n## When Redis is lost under load\n\n"
        + table(faults, ("requests/s", "E2E p50, ms", "p99, ms", "max, ms", "failed or refused"), "Redis")
        + f"\n## Equal tenants through different routers, workers of {PACE:,.0f} tokens/s\n\n"
        "Tenant a uses both workers. Tokens per second in the second half.\n\n"
        + table(fair, ("a", "b", "Jain's index", "errors"))
    )
    print(text)
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / f"quotas-{found['date']}.md").write_text(text)


if __name__ == "__main__":
    main()
