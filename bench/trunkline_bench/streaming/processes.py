"""The processes of a run, and their CPU time and memory."""

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from json import dumps, loads
from pathlib import Path

from trunkline.client.client import Client
from trunkline_bench.servers.cpu_time import cpu_s
from trunkline_bench.servers.ports import free_port
from trunkline_bench.streaming.client import Load, Seen
from trunkline_bench.streaming.smg import SMG, SMG_DIRECT, launched

START_S = 60.0
ROUTER, HTTP, BEFORE, HTTP_BEFORE = "router", "router, HTTP", "router before", "router before, HTTP"
BARE = "HTTP server alone"
CHAT, PARSED = "router, chat", "router, chat that is parsed"
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
SAMPLE_INTERVAL_S = 0.05


@dataclass(frozen=True, slots=True)
class Hop:
    """A process that a client can call: a router, a gateway, or the source itself."""

    address: str
    wire: str  # one of WIRES
    pid: int

    def cpu_s(self) -> float:
        """User and system time since the process started."""
        return cpu_s(self.pid)

    def resident_mib(self) -> float:
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * PAGE_BYTES / (1 << 20)


@dataclass(frozen=True, slots=True)
class Run:
    """The result of one client's run, and the hop's resources."""

    seen: Seen
    hop_cpu_s: float
    resident_mib: float  # before the run
    peak_mib: float


@asynccontextmanager
async def hops(steps_per_s: float, before: Path | None, smg: Path | None) -> AsyncIterator[dict[str, Hop]]:
    """A source and the hops in front of it, by name; "direct" is the source itself.

    A router has two hops, one per protocol. CHAT and PARSED have a router and source of their own each. PARSED's source
    names a format, so its router looks for reasoning and calls in the answers, which have none.

    before: another checkout, whose router is BEFORE, and HTTP_BEFORE if it serves HTTP; smg: the command that starts
    SMG, which is the hop SMG in front of a source of its own, SMG_DIRECT
    """
    module, pace = "trunkline_bench.streaming", ("--steps-per-s", str(steps_per_s))
    async with contextlib.AsyncExitStack() as stack:
        source = await stack.enter_async_context(process(f"{module}.source", *pace))
        direct = Hop(await printed_address(source), "worker", source.pid)
        passing = await stack.enter_async_context(process(f"{module}.passthrough", direct.address))
        found = {"direct": direct, "passthrough": Hop(await printed_address(passing), "worker", passing.pid)}
        bare = await stack.enter_async_context(process(f"{module}.bare", *pace))
        found[BARE] = Hop(await printed_address(bare), "http", bare.pid)
        found |= await router_hops(stack, direct.address, (ROUTER, HTTP))
        for name, answer_format in ((CHAT, ""), (PARSED, "hermes")):
            chatting = process(f"{module}.source", *pace, variables={"ANSWER_FORMAT": answer_format})
            address = await printed_address(await stack.enter_async_context(chatting))
            over_http = (await router_hops(stack, address, ("", name)))[name]
            found[name] = replace(over_http, wire="chat")
        if before is not None:
            found |= await router_hops(stack, direct.address, (BEFORE, HTTP_BEFORE), before)
        if smg is not None:
            theirs = await stack.enter_async_context(process(f"{module}.vllm_source", *pace))
            found[SMG_DIRECT] = Hop(await printed_address(theirs), "vllm", theirs.pid)
            gateway = await stack.enter_async_context(launched(smg, found[SMG_DIRECT].address, START_S))
            found[SMG] = Hop(gateway.address, "completions", gateway.pid)
        yield found


async def router_hops(
    stack: contextlib.AsyncExitStack,
    worker: str,
    names: tuple[str, str],
    checkout: Path | None = None,
    variables: Mapping[str, str] | None = None,
) -> dict[str, Hop]:
    """The hops of a router that the stack ends: gRPC, and HTTP if the checkout has it. variables: of its environment"""
    port, http_port = free_port(), free_port()
    arguments = ["--workers", worker, "--port", str(port), "--slow-start-s", "0"]
    has_http = checkout is None or (checkout / "router/trunkline_router/http_app.py").exists()
    if has_http:
        arguments += ["--http-port", str(http_port)]
    running = process("trunkline_router.main", *arguments, checkout=checkout, variables=variables)
    router = await stack.enter_async_context(running)
    hops = [Hop(f"127.0.0.1:{port}", "edge", router.pid), Hop(f"127.0.0.1:{http_port}", "http", router.pid)]
    async with Client(hops[0].address) as client:
        await client.ready(START_S)
    return dict(zip(names, hops if has_http else hops[:1], strict=False))


async def run(hop: Hop, load: Load) -> Run:
    """Runs a load in a client process. Raises SystemExit if the client fails."""
    before_s, resident_mib = hop.cpu_s(), hop.resident_mib()
    peak_mib = resident_mib
    async with process("trunkline_bench.streaming.client", dumps(asdict(load))) as client:
        assert client.stdout is not None
        printing = asyncio.create_task(client.stdout.read())
        while not printing.done():
            await asyncio.wait({printing}, timeout=SAMPLE_INTERVAL_S)
            peak_mib = max(peak_mib, hop.resident_mib())
        if await client.wait():
            raise SystemExit(f"bench-streaming: the client failed: {load}")
    return Run(Seen(**loads(printing.result())), hop.cpu_s() - before_s, resident_mib, peak_mib)


@asynccontextmanager
async def process(
    module: str,
    *arguments: str,
    checkout: Path | None = None,
    variables: Mapping[str, str] | None = None,
    stdin: int | None = None,
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A Python module of this checkout or another one, as a process. A router's log is discarded."""
    environment = os.environ | (variables or {})
    if checkout is not None:
        environment["PYTHONPATH"] = f"{checkout}/protos:{checkout}/router"
    started = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, *arguments),
        env=environment,
        stdin=stdin,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL if "router" in module else None,
    )
    try:
        yield started
    finally:
        if started.returncode is None:
            started.terminate()
        await started.wait()


async def printed_address(started: asyncio.subprocess.Process) -> str:
    """The address of a server that prints its port."""
    assert started.stdout is not None
    line = await asyncio.wait_for(started.stdout.readline(), START_S)
    return f"127.0.0.1:{int(line)}"
