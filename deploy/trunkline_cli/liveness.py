"""Detects processes that hang: they run, but no longer answer the standard health service."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

# Each probe has its own connection, as in Kubernetes, and bypasses proxies.
CHANNEL_OPTIONS = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0))


@dataclass(frozen=True, slots=True)
class Probe:
    """The settings of liveness probes."""

    period_s: float = 10.0
    timeout_s: float = 5.0  # a busy machine may keep a healthy process waiting for seconds
    failure_threshold: int = 3
    start_up_s: float = 1800.0  # a worker answers only after it has loaded its model
    # Shorter than in the chart, so that a process that hangs soon after its start has answered a probe before.
    start_up_period_s: float = 1.0


# The values of helm/trunkline: livenessProbe in templates/_helpers.tpl, and startupSeconds. In the chart a router has
# no start-up probe. Here it has as much time to start as a worker, because loading workers slow the same machine down.
CHART_PROBE = Probe()


class Liveness:
    """Decides from the probes of a process whether it hangs, by Kubernetes' rules. Pure: time is passed in."""

    def __init__(self, probe: Probe, started_s: float) -> None:
        self._probe = probe
        self._started_s = started_s
        self._has_answered = False
        self._failures = 0  # consecutive ones since the first answer

    @property
    def period_s(self) -> float:
        """Time from the start of one probe to the start of the next."""
        return self._probe.period_s if self._has_answered else self._probe.start_up_period_s

    def after(self, answered: bool, now_s: float) -> str | None:
        """Records a probe's outcome; returns why the process counts as hung, or None if it does not."""
        probe = self._probe
        if answered:
            self._has_answered, self._failures = True, 0
        elif self._has_answered:
            self._failures += 1
            if self._failures >= probe.failure_threshold:
                return f"no answer to {self._failures} liveness probes in a row"
        elif now_s - self._started_s >= probe.start_up_s:
            return f"no answer to liveness probes within {probe.start_up_s:g} s of its start"
        return None


async def is_alive(address: str, timeout_s: float) -> bool:
    """Whether the process at an address reports within `timeout_s` that it is alive."""
    async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        request = health_pb2.HealthCheckRequest(service="liveness")
        try:
            answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout_s)
        except grpc.aio.AioRpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def until_hung(
    address: str,
    probe: Probe,
    answered: asyncio.Event,
    ask: Callable[[str, float], Awaitable[bool]] = is_alive,
) -> str:
    """Probes a process from its start until it counts as hung; returns why.  answered: set at its first answer"""
    now_s = asyncio.get_running_loop().time
    liveness = Liveness(probe, now_s())
    while True:
        begun_s = now_s()
        is_answer = await ask(address, probe.timeout_s)
        if is_answer:
            answered.set()
        reason = liveness.after(is_answer, now_s())
        if reason is not None:
            return reason
        await asyncio.sleep(max(0.0, begun_s + liveness.period_s - now_s()))
