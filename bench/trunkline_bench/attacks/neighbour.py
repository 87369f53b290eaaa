"""A false worker in a fleet of real ones."""

from contextlib import AsyncExitStack
from dataclasses import dataclass

import grpc

from trunkline.v1.fleet_pb2 import ListWorkersRequest
from trunkline.v1.fleet_pb2_grpc import FleetServiceStub
from trunkline_bench.attacks.catalogue import Case
from trunkline_bench.attacks.server import Server
from trunkline_bench.attacks.vectors.attacker import FAST_MODEL, UNREAD_STREAMS
from trunkline_bench.attacks.vectors.false_worker import LISTENING
from trunkline_bench.attacks.vectors.http_floods import UNREAD_HTTP_STREAMS
from trunkline_bench.attacks.vectors.lies import LIES
from trunkline_bench.faults.fleet import START_S, Process
from trunkline_bench.servers.ports import free_port

SHOWN_CHARACTERS = 60  # of a worker's problem, as the router reports it
STATES = ("", "connecting", "ready", "draining", "broken", "hung")


@dataclass(frozen=True, slots=True)
class Neighbour:
    """The process of a false worker, which may not have started, and the address it will listen on."""

    process: Process
    address: str

    async def start(self) -> None:
        """Returns when the worker listens. Raises FleetError."""
        await self.process.start()
        await self.process.wait_for(LISTENING)

    async def as_told_by(self, router: Server) -> str:
        """What the router reports about the worker: its state and problem."""
        async with grpc.aio.insecure_channel(router.address) as channel:
            listed = await FleetServiceStub(channel).ListWorkers(ListWorkersRequest(), timeout=START_S)
        return next(_shown(one.state, one.problem) for one in listed.workers if one.address == self.address)


async def neighbour_of(real: Server, case: Case, stack: AsyncExitStack) -> Neighbour | None:
    """The false worker that an attack needs, if any. It is already started, unless starting it is the attack.

    Raises FleetError."""
    if case.attack in LIES:
        return _false_worker(real, f"--lie={case.attack}", stack)
    if case.attack in (UNREAD_STREAMS, UNREAD_HTTP_STREAMS):
        fast = _false_worker(real, f"--model={FAST_MODEL}", stack)
        await fast.start()
        return fast
    return None


def _false_worker(real: Server, flag: str, stack: AsyncExitStack) -> Neighbour:
    port = free_port()
    command = ("-m", "trunkline_bench.attacks.vectors.false_worker", f"--port={port}", f"--of={real.address}", flag)
    process = Process("python", *command)
    stack.push_async_callback(process.stop)
    return Neighbour(process, f"127.0.0.1:{port}")


def _shown(state: int, problem: str) -> str:
    if len(problem) > SHOWN_CHARACTERS:
        problem = problem[:SHOWN_CHARACTERS] + "…"
    return f"{STATES[state]}: {problem}" if problem else STATES[state]
