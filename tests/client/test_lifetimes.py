"""How calls end: by leaving the loop, close(), a cancelled task, Ctrl-C or a fork. Nothing is left over."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.client.scripted_service import ScriptedService, serving
from trunkline import Client, SyncClient
from trunkline.errors import DeadlineExceeded, TrunklineError
from trunkline.status import RequestRefused, no_worker

PROTOS = Path(__file__).parents[2] / "protos"
PATIENCE_S = 60.0
FAR = RequestRefused(8, "OVERLOADED", "full", retry_delay_ms=25_000)


@pytest.fixture
async def endless() -> AsyncIterator[ScriptedService]:
    service = ScriptedService(texts=["a"], endless=True)
    async with serving(service):
        yield service


async def cancelled(service: ScriptedService) -> None:
    async with asyncio.timeout(PATIENCE_S):
        await service.cancelled.wait()


def others() -> set["asyncio.Task[object]"]:
    return asyncio.all_tasks() - {asyncio.current_task()}


async def test_leaving_an_asynchronous_loop_cancels_the_request(endless: ScriptedService) -> None:
    async with Client(endless.address) as client:
        async for piece in client.generate("x"):
            assert piece.text == "a"
            break
        await cancelled(endless)


async def test_cancelling_the_task_cancels_the_request_and_stays_a_cancellation(endless: ScriptedService) -> None:
    async with Client(endless.address) as client:
        pieces = client.generate("x")
        await anext(pieces)
        waiting = asyncio.create_task(anext(pieces))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await cancelled(endless)


async def test_closing_the_client_ends_a_stream_with_an_error_and_not_a_cancellation(endless: ScriptedService) -> None:
    client = Client(endless.address)
    pieces = client.generate("x", request_id="r-1")
    await anext(pieces)
    waiting = asyncio.create_task(anext(pieces))
    await asyncio.sleep(0)
    await client.close()
    with pytest.raises(TrunklineError, match="the client was closed") as caught:
        await waiting
    assert caught.value.request_id == "r-1"
    await cancelled(endless)
    with pytest.raises(TrunklineError, match="the client was closed"):
        await client.list_models()
    with pytest.raises(TrunklineError, match="the client was closed"):
        await client.complete("x")
    with pytest.raises(TrunklineError, match="the client was closed"):
        await client.ready(PATIENCE_S)


async def test_closing_the_client_ends_a_wait_for_the_next_try() -> None:
    service = ScriptedService(refusals=[FAR])
    async with serving(service):
        client = Client(service.address)
        waiting = asyncio.create_task(client.complete("x"))
        while not service.asked:  # noqa: ASYNC110  # the arrival has no event
            await asyncio.sleep(0.002)
        await client.close()
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(TrunklineError):
                await waiting
    assert len(service.asked) == 1


async def test_a_failed_ready_leaves_no_task_behind() -> None:
    """One connection fails at once, the others would wait on."""

    def once() -> str:
        if keys:
            return keys.pop()
        raise LookupError("no key")

    keys = ["k", "k"]
    before = others()
    async with Client("127.0.0.1:1", connections=3, api_key=once) as client:
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(LookupError):
                await client.ready(10 * PATIENCE_S)
            while others() != before:  # noqa: ASYNC110  # gRPC's own tasks end a moment later
                await asyncio.sleep(0.002)


def test_a_loop_that_ends_in_the_middle_of_a_stream_prints_no_warning(tmp_path: Path) -> None:
    """Neither tasks that are still pending nor errors of generators that are collected late."""
    script = """
import asyncio, sys
from trunkline import Client
async def main():
    asyncio.get_running_loop().slow_callback_duration = 60.0  # a busy machine is not what this is about
    client = Client(sys.argv[1])
    pieces = client.generate("x")
    await anext(pieces)
    if sys.argv[2] == "closed":
        await client.close()
asyncio.run(main(), debug=True)
"""
    for ending in ("closed", "open"):
        done = run_beside_a_server(script, ending)
        assert (done.returncode, done.stderr) == (0, "")


def run_beside_a_server(script: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    async def both() -> "subprocess.CompletedProcess[str]":
        service = ScriptedService(texts=["a"], endless=True)
        async with serving(service):
            return await asyncio.to_thread(run_script, script, service.address, *arguments)

    return asyncio.run(both())


def run_script(script: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-W", "error", "-c", script, *arguments]
    environment = {**os.environ, "PYTHONPATH": str(PROTOS)}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=PATIENCE_S * 2)


async def test_leaving_a_blocking_loop_cancels_the_request_at_once(endless: ScriptedService) -> None:
    def leave(client: SyncClient) -> None:
        gc.disable()  # the generator must not need the collector
        for piece in client.generate("x"):
            assert piece.text == "a"
            break

    with SyncClient(endless.address) as client:
        try:
            await asyncio.to_thread(leave, client)
            await cancelled(endless)
        finally:
            gc.enable()


async def test_closing_a_blocking_client_ends_the_calls_of_all_threads(endless: ScriptedService) -> None:
    started, client = threading.Barrier(4), SyncClient(endless.address)

    def read() -> str:
        try:
            for _ in client.generate("x"):
                started.wait(PATIENCE_S)
        except TrunklineError as error:
            return str(error)
        return "ended"

    reading = [asyncio.create_task(asyncio.to_thread(read)) for _ in range(3)]
    await asyncio.to_thread(started.wait, PATIENCE_S)
    client.close()
    assert await asyncio.gather(*reading) == ["the client was closed"] * 3
    await cancelled(endless)
    with pytest.raises(TrunklineError, match="the client was closed"):
        client.list_models()
    with pytest.raises(TrunklineError, match="the client was closed"):
        client.ready(PATIENCE_S)


async def test_closing_a_blocking_client_ends_a_wait_for_the_next_try() -> None:
    service = ScriptedService(refusals=[FAR])
    async with serving(service):
        client = SyncClient(service.address)
        waiting = asyncio.create_task(asyncio.to_thread(client.complete, "x"))
        while not service.asked:  # noqa: ASYNC110  # the arrival has no event
            await asyncio.sleep(0.002)
        client.close()
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(TrunklineError):
                await waiting
    assert len(service.asked) == 1


async def test_threads_share_a_blocking_client() -> None:
    service = ScriptedService(refusals=[no_worker("none", 5)] * 3)
    async with serving(service):
        with SyncClient(service.address, connections=2) as client:
            answers = await asyncio.gather(*(asyncio.to_thread(client.complete, "x") for _ in range(20)))
    assert [answer.text for answer in answers] == ["ab"] * 20
    assert len({answer.request_id for answer in answers}) == 20


def test_a_blocking_client_works_where_an_event_loop_runs() -> None:
    """As in a notebook, whose cells run inside the loop's thread."""
    script = """
import asyncio, sys
from trunkline import SyncClient
async def cell():
    with SyncClient(sys.argv[1]) as client:
        print(next(client.generate("x")).text)
asyncio.run(cell())
"""
    done = run_beside_a_server(script)
    assert (done.stdout, done.stderr) == ("a\n", "")


def test_ctrl_c_interrupts_a_blocking_stream_and_cancels_its_request() -> None:
    script = """
import sys
from trunkline import SyncClient
with SyncClient(sys.argv[1]) as client:
    try:
        for piece in client.generate("x"):
            print(piece.text, flush=True)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        sys.stdin.read()
"""

    async def scenario() -> str:
        service = ScriptedService(texts=["a"], endless=True)
        async with serving(service):
            command = [sys.executable, "-W", "error", "-c", script, service.address]
            environment = {**os.environ, "PYTHONPATH": str(PROTOS)}
            pipe = asyncio.subprocess.PIPE
            process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, env=environment)
            assert process.stdout is not None
            assert await process.stdout.readline() == b"a\n"
            process.send_signal(signal.SIGINT)
            assert await process.stdout.readline() == b"interrupted\n"
            await cancelled(service)  # while the process still runs
            printed, _ = await process.communicate(b"")
            assert process.returncode == 0
            return printed.decode()

    assert asyncio.run(scenario()) == ""


def test_after_a_fork_the_old_client_says_so_and_a_new_one_works() -> None:
    script = """
import os, sys
from trunkline import SyncClient
from trunkline.errors import TrunklineError
client = SyncClient(sys.argv[1])
next(client.generate("x"))
child = os.fork()
if child == 0:
    try:
        client.list_models()
    except TrunklineError as error:
        print(error, flush=True)
    with SyncClient(sys.argv[1]) as other:
        print(next(other.generate("x")).text, flush=True)
    client.close()
    sys.exit()
assert os.waitpid(child, 0)[1] == 0
print(next(client.generate("x")).text)
client.close()
"""
    done = run_beside_a_server(script)
    assert done.stdout.splitlines() == [
        "the client was made before a fork: make a new one in the child process",
        "a",
        "a",
    ]
    assert done.returncode == 0


async def test_a_blocking_ready_waits_for_a_server_and_has_a_deadline() -> None:
    with SyncClient("127.0.0.1:1") as client, pytest.raises(DeadlineExceeded, match=r"was not ready within 0\.2 s"):
        client.ready(0.2)
    service = ScriptedService()
    async with serving(service) as server:
        await server.set_ready(False)
        with SyncClient(service.address, connections=2) as client:
            with pytest.raises(DeadlineExceeded):
                await asyncio.to_thread(client.ready, 0.2)
            waiting = asyncio.create_task(asyncio.to_thread(client.ready, PATIENCE_S))
            await server.set_ready(True)
            await waiting
