"""The router as a process: settings, readiness, signals."""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest

from tests.router.cluster import PATIENCE_S, SERVICE, Refusal, refusal
from tests.router.fake_worker import FakeChoice, FakeWorker
from tests.router.router_process import NOT_SERVING, SERVING, router_process, start, until_health
from trunkline.v1.inference_pb2 import GenerateRequest, GenerateResponse
from trunkline.v1.inference_pb2_grpc import InferenceServiceStub
from trunkline_bench.servers.ports import free_port
from trunkline_router.main import router_settings
from trunkline_router.process import tell_listening
from trunkline_router.router import SWITCH_S
from trunkline_router.settings import address_problem
from trunkline_runtime.channel import open_channel

WHEN_IT_LISTENS = """
import asyncio, gc, os, signal, sys
from pathlib import Path
from trunkline_router.main import router_settings
from trunkline_router.access.identity.authenticator import Authenticator
from trunkline_router.access.access import Access
from trunkline_router.assembly import SharedPort
from trunkline_router.router import serve
from trunkline_runtime.tracing import open_tracing

def on_listening():
    print("found:", gc.get_freeze_count(), sys.getswitchinterval())
    os.kill(os.getpid(), signal.SIGTERM)

shared_port = SharedPort(on_listening, once_useful=False, directory=Path("absent"), number=0, restarts=0)
tracing = open_tracing("trunkline-router")
asyncio.run(serve(router_settings(sys.argv[1:]), Access(), Authenticator(), tracing, shared_port))
"""


async def test_what_is_there_when_it_listens_is_not_collected_again_and_threads_take_short_turns() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        WHEN_IT_LISTENS,
        *("--port", str(free_port()), "--workers", "127.0.0.1:1"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    said, _ = await asyncio.wait_for(process.communicate(), PATIENCE_S)
    frozen, switch_s = said.decode().partition("found: ")[2].split()[:2]
    assert process.returncode == 0
    assert int(frozen) > 10_000, "the modules alone are more objects"
    assert float(switch_s) == pytest.approx(SWITCH_S)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "--workers"),
        (("--workers", ","), "--workers"),
        (("--workers", "localhost"), "host:port"),
        (("--workers", "h:1", "--port", "70000"), "0 to 65535"),
        (("--workers", "h:1", "--max-choices", "none"), "--max-choices"),
        (
            ("--workers", "localhost:1", "--max-stored-responses", "9", "--processes", "2"),
            "needs --processes=1, not 2",
        ),
    ],
)
def test_a_bad_setting_is_one_line_and_exit_status_two(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        router_settings(arguments)
    told = capsys.readouterr().err
    assert caught.value.code == 2
    assert told.count("\n") == 1
    assert said in told


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--workers", "localhost"), "host:port"),
        # Files are read later than settings.
        (("--workers", "localhost:1", "--tenants", "/nowhere.json"), "--tenants=/nowhere.json: No such file"),
    ],
)
async def test_a_process_that_cannot_start_is_one_line_and_exit_status_two(
    arguments: tuple[str, ...], said: str
) -> None:
    process = await start(*arguments)
    _, stderr = await process.communicate()
    assert process.returncode == 2
    assert stderr.decode().count("\n") == 1
    assert said in stderr.decode()


async def test_a_bad_tracing_variable_is_one_line_and_exit_status_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "pigeon")
    process = await start("--workers", "127.0.0.1:1")
    _, stderr = await process.communicate()
    assert process.returncode == 2
    assert stderr.decode() == (
        "trunkline-router: OTEL_TRACES_EXPORTER=pigeon is not supported; allowed: otlp, console, none\n"
    )


async def test_a_taken_port_is_one_line_and_exit_status_two() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        process = await start("--port", str(port), "--workers", "127.0.0.1:1")
        _, stderr = await process.communicate()
    assert process.returncode == 2
    *_, last = stderr.decode().splitlines()
    assert last == f"trunkline-router: port {port} on 127.0.0.1 is in use; choose another with --port"
    assert "Traceback" not in stderr.decode()


@pytest.mark.parametrize(
    ("address", "fine"),
    [
        ("a:1", True),
        ("[::1]:50061", True),
        ("a", False),
        (":1", False),
        ("a:0", False),
        ("a:99999", False),
        ("a:x", False),
    ],
)
def test_worker_addresses_are_checked(address: str, fine: bool) -> None:
    assert (address_problem((address,)) is None) == fine


async def test_it_is_alive_at_once_and_ready_while_it_has_a_worker() -> None:
    worker, port = await FakeWorker("a").start(), free_port()
    await worker.die()  # its address is known, but no process listens there yet
    async with router_process(port, worker.address), open_channel(f"127.0.0.1:{port}") as channel:
        await until_health(channel, "liveness", SERVING)
        await until_health(channel, "readiness", NOT_SERVING)
        await worker.start()
        for name in ("readiness", "", SERVICE):
            await until_health(channel, name, SERVING)
        await worker.die()
        for name in ("readiness", "", SERVICE):
            await until_health(channel, name, NOT_SERVING)
        await until_health(channel, "liveness", SERVING)


Running = grpc.aio.UnaryStreamCall[GenerateRequest, GenerateResponse]


@asynccontextmanager
async def running_request() -> AsyncIterator[tuple[asyncio.subprocess.Process, grpc.aio.Channel, FakeChoice, Running]]:
    """A router process with a request that has had its first token."""
    worker, port = await FakeWorker("a", answer=None).start(), free_port()
    try:
        async with router_process(port, worker.address) as process, open_channel(f"127.0.0.1:{port}") as channel:
            await until_health(channel, "readiness", SERVING)
            call = InferenceServiceStub(channel).Generate(GenerateRequest(text="x"))
            choice = await worker.arrived.get()
            choice.tokens(1)
            await call.read()
            yield process, channel, choice, call
    finally:
        await worker.die()


async def test_at_sigterm_a_running_request_finishes_and_a_new_one_is_turned_away() -> None:
    async with running_request() as (process, channel, choice, call):
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        while b"router stopping" not in await process.stderr.readline():
            pass
        turned_away: Refusal = await refusal(InferenceServiceStub(channel).Generate(GenerateRequest(text="y")))
        assert (turned_away.code, turned_away.reason) == (grpc.StatusCode.UNAVAILABLE, "NO_WORKER")
        await until_health(channel, "readiness", NOT_SERVING)
        choice.tokens(2, finish=True)
        last = await call.read()
        assert isinstance(last, GenerateResponse)
        assert last.usage.completion_tokens == 3
        async with asyncio.timeout(PATIENCE_S):
            assert await process.wait() == 0


async def test_a_second_signal_ends_it_at_once() -> None:
    async with running_request() as (process, _, _, call):
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        while b"router stopping" not in await process.stderr.readline():
            pass
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(60):
            assert await process.wait() == 0
        assert (await refusal(call)).code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


def test_a_parent_that_is_stopping_need_not_hear_that_its_process_listens() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    tell_listening(writing)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(writing)
