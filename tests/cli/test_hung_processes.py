"""A local cluster whose processes hang: real ones, stopped with SIGSTOP, under a launcher that probes often."""

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.cluster.processes import Process, alive, descendants, script, wait_until
from tests.worker.engine_rig import DEMO_MODEL
from trunkline import Client
from trunkline_bench.servers.ports import free_port
from trunkline_cli import console, launcher
from trunkline_cli.launcher import Cluster
from trunkline_cli.liveness import CHART_PROBE, Probe, is_alive, until_hung
from trunkline_cli.passed_flags import PassedFlags
from trunkline_cli.plan import ClusterPlan

# Processes on a busy machine must not look hung, so the timeout stays long; the other times are short.
OFTEN = Probe(period_s=0.2, timeout_s=2.0, failure_threshold=3, start_up_period_s=0.1)
KNOWN_S = OFTEN.failure_threshold * (OFTEN.period_s + OFTEN.timeout_s)
STOP_S = 1.0
SLACK_S = 60.0  # for a slow or busy machine: what waits for a hung process waits for good
PROMPT = [5, *range(10, 900)]


def found(pids: set[int], what: bytes) -> int:
    """The process among `pids` whose command line contains `what`."""
    (pid,) = (pid for pid in pids if what in Path(f"/proc/{pid}/cmdline").read_bytes())
    return pid


class Launched:
    """A cluster of one worker in this process's event loop, with its messages and its probes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *worker_arguments: str) -> None:
        arguments = ("--kv-blocks=256", "--device=cpu", *worker_arguments)
        flags = PassedFlags(workers=arguments)
        self.plan = ClusterPlan(DEMO_MODEL, "m", 1, "127.0.0.1", free_port(), free_port(), flags, threads=1)
        self.said: list[str] = []
        self.probes: Counter[tuple[str, bool]] = Counter()  # by address and outcome
        self.stop = asyncio.Event()
        self.cluster = Cluster(self.plan, OFTEN)

        async def ask(address: str, timeout_s: float) -> bool:
            answered = await is_alive(address, timeout_s)
            self.probes[address, answered] += 1
            return answered

        for module in (launcher, console):
            monkeypatch.setattr(module, "say", self.said.append)
        monkeypatch.setattr(
            launcher, "until_hung", lambda address, probe, answered: until_hung(address, probe, answered, ask)
        )
        monkeypatch.setattr(launcher, "STOP_S", STOP_S)

    def pid(self, name: str) -> int:
        return self.cluster._children[name].process.pid

    async def until(self, condition: object, what: str) -> None:
        assert callable(condition)
        await asyncio.to_thread(wait_until, condition, what)

    async def until_ready(self) -> None:
        await self.until(lambda: any("router is ready" in line for line in self.said), "the cluster is ready")

    def restarts(self) -> list[str]:
        return [line for line in self.said if "starting it again" in line]

    async def generates(self) -> None:
        """Waits until the cluster is ready, and generates a few tokens."""
        async with Client(self.plan.router_address) as client:
            await client.ready()
            done = await client.complete(PROMPT, max_tokens=3, ignore_eos=True)
            assert len(done.choices[0].token_ids) == 3

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Runs the cluster inside the block, and stops it even if the test fails."""
        running = asyncio.create_task(self.cluster.run(self.stop))
        try:
            yield
        finally:
            self.stop.set()
            await running


@pytest.mark.slow
async def test_what_loads_or_computes_is_left_alone_and_what_hangs_is_started_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All in one cluster, because starting one takes seconds. Stopping it does not wait for hung processes either."""
    launched = Launched(monkeypatch)
    names = ("worker-0", "router")
    async with launched.running():
        await left_alone_while_it_loads(launched)
        await left_alone_while_it_computes(launched)
        assert not launched.restarts()
        first = {name: launched.pid(name) for name in names}
        family = set().union(*map(descendants, first.values()))
        assert len(family) >= 3, "router, front, engine"
        hung_s = time.monotonic()
        for pid in first.values():
            os.kill(pid, signal.SIGSTOP)
        await launched.until(lambda: len(launched.restarts()) == 2, "both were found to hang")
        assert time.monotonic() - hung_s < KNOWN_S + STOP_S + SLACK_S
        for name in names:
            (line,) = (line for line in launched.restarts() if line.startswith(f"{name} "))
            expected = f"{name} hung (no answer to 3 liveness probes in a row) and was stopped (killed by SIGKILL); "
            assert line.startswith(expected + "starting it again in 0.")
        await launched.until(lambda: not alive(family), "nothing is left of them, engine and all")
        await launched.until(lambda: all(launched.pid(name) != first[name] for name in names), "started again")
        await launched.generates()
        family = set().union(*(descendants(launched.pid(name)) for name in names))
        for pid in (launched.pid("worker-0"), found(family, b"engine_process")):
            os.kill(pid, signal.SIGSTOP)
        stopped_s = time.monotonic()
    assert time.monotonic() - stopped_s < STOP_S + SLACK_S
    await launched.until(lambda: not alive(family), "all are gone")


async def left_alone_while_it_loads(launched: Launched) -> None:
    """A front that is stopped before its first answer looks like one that is loading a model."""
    worker = launched.plan.worker_address(0)
    await launched.until(lambda: "worker-0" in launched.cluster._children, "it was started")
    os.kill(launched.pid("worker-0"), signal.SIGSTOP)
    await launched.until(lambda: launched.probes[worker, False] >= 3 * OFTEN.failure_threshold, "it is probed")
    os.kill(launched.pid("worker-0"), signal.SIGCONT)
    await launched.until_ready()


async def left_alone_while_it_computes(launched: Launched) -> None:
    """Computes prompts as long as the context, for longer than three failed probes would take."""
    worker = launched.plan.worker_address(0)
    enough = launched.probes[worker, True] + 2 * OFTEN.failure_threshold
    async with Client(launched.plan.router_address) as client:
        for first in range(6, 500):
            prompts = [[5, first, *range(10 + n, 900)] for n in range(16)]
            await asyncio.gather(*(client.complete(prompt, max_tokens=1) for prompt in prompts))
            if launched.probes[worker, True] >= enough:
                return
    raise AssertionError("it was not probed often enough")


@pytest.mark.slow
def test_serve_recovers_from_a_hung_front_router_and_engine_in_the_times_it_states() -> None:
    port, step_timeout_s = free_port(), 20
    process = Process(
        script("trunkline"), "serve", f"--model={DEMO_MODEL}", f"--port={port}", f"--worker-port={free_port()}",
        "--workers=1", "--threads=1", "--kv-blocks=64", f"--step-timeout-s={step_timeout_s}",
    )  # fmt: skip
    known_s = CHART_PROBE.failure_threshold * CHART_PROBE.period_s + CHART_PROBE.timeout_s
    try:
        process.wait_for("Serving tiny-tales")

        def recovers(name: str, what: bytes, reason: str, most_s: float) -> None:
            before = len(process.lines)
            pid, stopped_s = found(descendants(process.popen.pid), what), time.monotonic()
            os.kill(pid, signal.SIGSTOP)
            wait_until(
                lambda: any(f"trunkline: {name} {reason}" in line for line in process.lines[before:]),
                f"{name} is known to hang", timeout_s=most_s + SLACK_S,
            )  # fmt: skip
            assert not alive({pid})
            assert time.monotonic() - stopped_s < most_s + SLACK_S
            ready = '"router listening"' if name == "router" else '"worker ready"'
            wait_until(lambda: any(ready in line for line in process.lines[before:]), "it is ready again")

        recovers("worker-0", b"bin/trunkline-worker", "hung (no answer", known_s + launcher.STOP_S)
        recovers("router", b"bin/trunkline-router", "hung (no answer", known_s + launcher.STOP_S)
        # The front asks its engine every 5 s, and waits 5 s longer than a step may take.
        recovers("worker-0", b"engine_process", "died (exit status 1)", step_timeout_s + 5.0 + 5.0 + 5.0)
        family = descendants(process.popen.pid)
        for what in (b"bin/trunkline-worker", b"bin/trunkline-router", b"engine_process"):
            os.kill(found(descendants(process.popen.pid), what), signal.SIGSTOP)
        ended_s = time.monotonic()
        process.popen.send_signal(signal.SIGINT)
        assert process.wait() == 0
        assert time.monotonic() - ended_s < launcher.STOP_S + 1.0 + SLACK_S
        wait_until(lambda: not alive(family), "all are gone")
    finally:
        process.stop()
