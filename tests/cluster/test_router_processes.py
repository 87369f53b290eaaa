"""A router of several processes on one port, before real workers: shared, started again, stopped, refused."""

import asyncio
import os
import signal
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cluster.processes import Cluster, Process, alive, descendants, script, wait_until
from tests.router.fake_worker import FakeChoice, FakeWorker
from trunkline import Client
from trunkline.client.client import Piece
from trunkline.errors import NoWorker, TrunklineError
from trunkline_bench.servers.ports import free_port
from trunkline_router.processes import FIRST_DELAY_S, MOST_DELAY_S, restart_delay_s
from trunkline_runtime.server import GrpcServer, PortInUse, hold_port

CONNECTIONS = (
    16  # the kernel deals them out by a hash: that one of two processes gets none happens once in 32,768 times
)


@contextmanager
def router(*arguments: str, processes: int, port: int = 0) -> Iterator[Process]:
    process = Process(
        script("trunkline-router"), f"--processes={processes}", f"--port={port}", "--http-port=-1", *arguments
    )
    try:
        yield process
    finally:
        process.stop()


@pytest.fixture(scope="module")
def two(cluster: Cluster) -> Iterator[tuple[Process, int]]:
    """A router of two processes, and its port."""
    port = free_port()
    with router(workers_of(cluster), processes=2, port=port) as process:
        for number in range(2):
            wait_listening(process, port, number)
        yield process, port


@pytest.fixture
async def silent() -> AsyncIterator[FakeWorker]:
    """A worker whose answers last until the test ends them."""
    worker = await FakeWorker("a", answer=None).start()
    yield worker
    await worker.die()


async def begun(worker: FakeWorker, pieces: AsyncGenerator[Piece, None]) -> tuple[FakeChoice, int]:
    """The worker's end of a stream, and how many tokens the client has."""
    first = asyncio.ensure_future(anext(pieces))
    choice = await worker.arrived.get()
    choice.tokens(1)
    return choice, len((await first).token_ids)


def workers_of(cluster: Cluster) -> str:
    return "--workers=" + ",".join(worker.address for worker in cluster.workers)


def wait_listening(process: Process, port: int, number: int) -> None:
    process.wait_for(f'"router listening".*:{port}/{number}"')


def everyone_of(process: Process, port: int) -> set[int]:
    """The process and its two, once both have started; the second waits for a worker before it listens."""
    wait_listening(process, port, 0)
    process.wait_for(f'"worker not connected".*:{port}/1"')
    everyone = descendants(process.popen.pid)
    assert len(everyone) == 3
    return everyone


async def ask(client: Client, times: int) -> list[str]:
    answers = await asyncio.gather(*(client.complete("Once upon", max_tokens=4, temperature=0) for _ in range(times)))
    return [answer.text for answer in answers]


def answered_by(process: Process, port: int) -> set[int]:
    """The processes that have ended a request."""
    ended = [line for line in process.lines if '"request ended"' in line]
    return {number for number in range(8) if any(f':{port}/{number}"' in line for line in ended)}


@pytest.mark.slow
async def test_requests_over_several_connections_are_answered_by_all_processes(two: tuple[Process, int]) -> None:
    process, port = two
    async with Client(f"127.0.0.1:{port}", connections=CONNECTIONS) as client:
        await client.ready()
        answers = await ask(client, CONNECTIONS)
    assert len(set(answers)) == 1, "whichever process it is, the answer is the same"
    wait_until(lambda: answered_by(process, port) == {0, 1}, "both processes have answered")


async def test_a_process_that_is_killed_is_started_again_and_no_request_meets_it_too_early(
    two: tuple[Process, int],
) -> None:
    process, port = two
    async with Client(f"127.0.0.1:{port}") as client:
        await client.ready()
    before = descendants(process.popen.pid) - {process.popen.pid}
    os.kill(min(before), signal.SIGKILL)
    process.wait_for('"router process died"')
    later = 0
    while later < CONNECTIONS:  # each over a connection of its own; all are answered
        later += sum('"router listening"' in line for line in process.lines) == 3
        async with Client(f"127.0.0.1:{port}") as client:
            await client.complete("Once upon", max_tokens=1)
    after = descendants(process.popen.pid) - {process.popen.pid}
    assert len(after) == 2
    assert len(after - before) == 1


@pytest.mark.slow
async def test_without_a_worker_one_process_says_so_and_the_other_waits() -> None:
    worker, port = await FakeWorker("a").start(), free_port()
    await worker.die()  # its address is known, nobody listens there yet
    with router(f"--workers={worker.address}", processes=2, port=port) as process:
        await asyncio.to_thread(wait_listening, process, port, 0)
        async with Client(f"127.0.0.1:{port}") as client:
            with pytest.raises(NoWorker) as caught:
                await client.complete("x")
            assert (caught.value.reason, caught.value.retry_after_s) == ("NO_WORKER", 1.0), "told when to come back"
            await worker.start()
            await asyncio.to_thread(wait_listening, process, port, 1)
            await client.ready()
    await worker.die()


def test_one_that_keeps_dying_is_started_less_and_less_often() -> None:
    delays_s = [restart_delay_s(deaths) for deaths in range(1, 100)]
    assert delays_s[:3] == [FIRST_DELAY_S, 2 * FIRST_DELAY_S, 4 * FIRST_DELAY_S]
    assert delays_s == sorted(delays_s)
    assert delays_s[-1] == MOST_DELAY_S


async def test_a_running_stream_finishes_at_sigterm(silent: FakeWorker) -> None:
    port = free_port()
    with router(f"--workers={silent.address}", "--stop-timeout-s=300", processes=2, port=port) as process:
        for number in range(2):
            await asyncio.to_thread(wait_listening, process, port, number)
        everyone = descendants(process.popen.pid)
        assert len(everyone) == 3
        async with Client(f"127.0.0.1:{port}") as client:
            await client.ready()
            pieces = client.generate("x")
            choice, tokens = await begun(silent, pieces)
            process.popen.terminate()
            await asyncio.to_thread(process.wait_for, '"router stopping"')
            choice.tokens(2, finish=True)
            async for piece in pieces:
                tokens += len(piece.token_ids)
        assert await asyncio.to_thread(process.wait) == 0  # in the block: to leave it sends SIGTERM
    assert tokens == 3
    assert not alive(everyone)
    assert sum('"router stopped"' in line for line in process.lines) == 2


@pytest.mark.slow
async def test_a_second_signal_ends_a_running_stream_at_once(silent: FakeWorker) -> None:
    port = free_port()
    with router(f"--workers={silent.address}", "--stop-timeout-s=300", processes=2, port=port) as process:
        async with Client(f"127.0.0.1:{port}") as client:
            await client.ready()
            pieces = client.generate("x")
            await begun(silent, pieces)
            process.popen.terminate()
            await asyncio.to_thread(process.wait_for, '"router stopping"')
            process.popen.terminate()
            with pytest.raises(TrunklineError):
                async for _ in pieces:
                    pass
        assert await asyncio.to_thread(process.wait) == 0  # in the block: to leave it sends SIGTERM


def test_no_process_outlives_the_one_that_started_it() -> None:
    """Killed; the two tests above have what happens at SIGTERM."""
    port = free_port()
    with router("--workers=127.0.0.1:1", processes=2, port=port) as process:
        everyone = everyone_of(process, port)
        process.popen.kill()
        wait_until(lambda: not alive(everyone), "all have ended")


@pytest.mark.slow
def test_a_process_that_does_not_stop_in_time_is_killed() -> None:
    port = free_port()
    with router("--workers=127.0.0.1:1", "--stop-timeout-s=0", processes=2, port=port) as process:
        everyone = everyone_of(process, port)
        os.kill(max(everyone), signal.SIGSTOP)
        process.popen.terminate()
        process.wait_for("did not stop in time and are killed")
        assert process.wait() == 0
        assert not alive(everyone)


def test_what_keeps_it_from_starting_is_said_once(tmp_path: Path) -> None:
    """Here: several processes do not keep quotas without a place to share them."""
    tenants = tmp_path / "tenants.json"
    tenants.write_text('{"acme": {"requests_per_minute": 5}}')
    with router("--workers=127.0.0.1:1", f"--tenants={tenants}", processes=3) as process:
        assert process.wait() == 2
    assert process.lines == [
        "trunkline-router: --tenants has quotas, which several processes can only keep together with --redis-url"
    ]


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_port_of_a_router_of_several_processes_is_refused_to_another_router(
    two: tuple[Process, int], processes: int
) -> None:
    _, port = two
    said = f"trunkline-router: port {port} on 127.0.0.1 is in use; choose another with --port"
    with router("--workers=127.0.0.1:1", processes=processes, port=port) as other:
        assert other.wait() == 2
    assert other.lines == [said]


def test_a_port_that_somebody_else_would_share_is_refused() -> None:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", 0))
        port = other.getsockname()[1]
        with pytest.raises(PortInUse, match=f"port {port} on 127.0.0.1 is in use"):
            hold_port("127.0.0.1", port)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::1", "::"])
async def test_a_held_port_is_for_those_who_share_it_alone(host: str) -> None:
    with hold_port(host, 0) as holder:
        port = holder.getsockname()[1]
        with pytest.raises(PortInUse):
            hold_port(host, port)
        with pytest.raises(PortInUse):
            await GrpcServer(host, port, services=[]).start()
        servers = [GrpcServer(host, port, services=[], shared_port=True) for _ in range(2)]
        for server in servers:
            await server.start()
            assert server.port == port
        with pytest.raises(PortInUse):
            hold_port(host, port)
        for server in servers:
            await server.stop(0)


def test_connections_that_the_last_server_closed_do_not_keep_the_port() -> None:
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as gRPC's listeners have it
        server.bind(("127.0.0.1", 0))
        server.listen()
        address = server.getsockname()
        with socket.create_connection(address) as client:
            accepted, _ = server.accept()
            accepted.close()  # first: its end stays in TIME_WAIT
            assert client.recv(1) == b""
    with socket.socket() as plain, pytest.raises(OSError, match="in use"):
        plain.bind(address)
    with hold_port(*address) as holder:
        assert holder.getsockname() == address
        with pytest.raises(PortInUse):
            hold_port(*address)


def test_a_client_has_at_least_one_connection() -> None:
    with pytest.raises(ValueError, match="connections=0 is out of range; allowed: 1 or more"):
        Client(connections=0)
