"""Who can connect to a server with TLS, and what becomes of connections when certificates are replaced."""

import asyncio
import contextlib
import os
import ssl
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from structlog.testing import capture_logs

from tests.certificates import LIFETIME_S, Authority, TlsDirectory
from trunkline.tls import ClientTls, open_channel
from trunkline.tls_files import TlsFileError
from trunkline_bench.servers.ports import free_port
from trunkline_runtime.server import LIVENESS, GrpcServer
from trunkline_runtime.tls import ServerTls, TlsFiles
from trunkline_runtime.tls_settings import is_loopback

NAME = "server.test"
# Each channel has a connection of its own, and gives up after the first attempt.
ALONE = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0))


class Fleet:
    """A server with TLS that counts upwards for each caller, whenever it is told to, and files for its clients."""

    def __init__(self, folder: Path) -> None:
        self.authority, self.other = Authority("one"), Authority("two")
        self._folder = folder
        self.server_files = self.files("server", self.authority.issue(NAME))
        self.client_files = self.files("client", self.authority.issue("client.test"))
        self.tls = ServerTls(TlsFiles(self.server_files.cert, self.server_files.key, self.server_files.ca))
        self.server = GrpcServer("127.0.0.1", 0, services=[], tls=self.tls)
        self.go_on = asyncio.Event()
        handler: Any = grpc.unary_stream_rpc_method_handler(self._count, bytes)
        self.server.grpc.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("Test", {"Count": handler}),))

    def files(self, name: str, pair: Any, authority: Authority | None = None) -> TlsDirectory:
        return TlsDirectory(self._folder / name).write(pair, (authority or self.authority).pem)

    async def _count(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield b"1"
        await self.go_on.wait()
        yield b"2"

    def channel(self, files: TlsDirectory | None = None, name: str = NAME) -> grpc.aio.Channel:
        files = files or self.client_files
        tls = ClientTls(ca_file=files.ca, cert_file=files.cert, key_file=files.key, server_name=name)
        return open_channel(f"127.0.0.1:{self.server.port}", ALONE, tls)

    async def said_to(self, channel: grpc.aio.Channel) -> str:
        """The first answer on a channel, or why there is none."""
        async with channel:
            count: Any = channel.unary_stream("/Test/Count")
            call = count(b"", timeout=60)
            try:
                return str((await call.read()).decode())
            except grpc.aio.AioRpcError as error:
                return f"{error.code().name}: {error.details()}"
            finally:
                call.cancel()


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    made = Fleet(tmp_path)
    await made.server.start()
    yield made
    await made.server.stop(0)


@asynccontextmanager
async def stream(fleet: Fleet) -> AsyncIterator[Any]:
    """A stream of which the first answer has arrived; at the end, it must go on."""
    async with fleet.channel() as channel:
        count: Any = channel.unary_stream("/Test/Count")
        call = count(b"", timeout=60)
        assert await call.read() == b"1"
        yield call
        fleet.go_on.set()
        assert await call.read() == b"2"


Make = Callable[[Fleet], grpc.aio.Channel]
REFUSED: dict[str, Make] = {
    "a client that trusts another authority": lambda fleet: fleet.channel(
        fleet.files("x", fleet.authority.issue("client.test"), fleet.other)
    ),
    "a client that expects another name": lambda fleet: fleet.channel(name="other.test"),
    "a client that expects the address": lambda fleet: fleet.channel(name=""),
    "a client without a certificate": lambda fleet: open_channel(
        f"127.0.0.1:{fleet.server.port}", ALONE, ClientTls(fleet.client_files.ca, server_name=NAME)
    ),
    "a client of another authority": lambda fleet: fleet.channel(fleet.files("x", fleet.other.issue("client.test"))),
    "a client whose certificate has expired": lambda fleet: fleet.channel(
        fleet.files("x", fleet.authority.issue("client.test", until_s=-1))
    ),
    "a client whose certificate is not valid yet": lambda fleet: fleet.channel(
        fleet.files("x", fleet.authority.issue("client.test", from_s=600))
    ),
    "a client without TLS": lambda fleet: open_channel(f"127.0.0.1:{fleet.server.port}", ALONE),
}


@pytest.mark.parametrize("who", REFUSED)
async def test_a_client_that_may_not_connect_is_told_so_and_disturbs_no_stream(fleet: Fleet, who: str) -> None:
    async with stream(fleet):
        assert (await fleet.said_to(REFUSED[who](fleet))).startswith("UNAVAILABLE: ")
        assert await fleet.said_to(fleet.channel()) == "1"


@pytest.mark.parametrize(
    ("from_s", "until_s"), [(-60.0, -1.0), (600.0, LIFETIME_S)], ids=["has expired", "is not valid yet"]
)
async def test_clients_refuse_a_server_whose_certificate(fleet: Fleet, from_s: float, until_s: float) -> None:
    fleet.files("server", fleet.authority.issue(NAME, from_s=from_s, until_s=until_s))
    assert "CERTIFICATE_VERIFY_FAILED" in await fleet.said_to(fleet.channel())


async def test_a_stream_goes_on_while_new_connections_meet_the_new_certificate_and_the_new_authority(
    fleet: Fleet,
) -> None:
    async with stream(fleet):
        fleet.files("server", fleet.other.issue(NAME), fleet.other)
        assert (await fleet.said_to(fleet.channel())).startswith("UNAVAILABLE: "), "of the authority before"
        assert await fleet.said_to(fleet.channel(fleet.files("new", fleet.other.issue("c"), fleet.other))) == "1"


async def test_a_client_of_the_authority_before_is_refused_even_if_it_trusts_the_new_one(fleet: Fleet) -> None:
    fleet.files("server", fleet.other.issue(NAME), fleet.other)
    old = fleet.files("x", fleet.authority.issue("client.test"), fleet.other)
    assert (await fleet.said_to(fleet.channel(old))).startswith("UNAVAILABLE: ")


async def test_half_of_a_new_pair_leaves_the_last_one_in_use_until_the_other_half_comes(fleet: Fleet) -> None:
    new = fleet.other.issue(NAME)
    files = fleet.server_files
    with capture_logs() as lines:
        for half in (new.chain, new.chain[:200], b""):
            files.put(files.cert, half)
            assert await fleet.said_to(fleet.channel()) == "1"
            assert await fleet.said_to(fleet.channel()) == "1"
    assert [line["log_level"] for line in lines] == ["warning"] * 3, "one line for each change"
    assert all("\n" not in line["problem"] and files.cert in line["problem"] for line in lines)
    os.unlink(files.cert)
    assert await fleet.said_to(fleet.channel()) == "1"
    files.put(files.cert, new.chain)
    files.put(files.key, new.key)
    trusting = fleet.files("new", fleet.authority.issue("client.test"), fleet.other)
    assert await fleet.said_to(fleet.channel(trusting)) == "1"


async def test_a_mounted_secret_is_replaced_as_kubernetes_does_it(tmp_path: Path) -> None:
    first, second = Authority("first"), Authority("second")
    mount = tmp_path / "mount"
    mount.mkdir()
    for name, authority in (("..1", first), ("..2", second)):
        TlsDirectory(mount / name).write(authority.issue(NAME), authority.pem)
    (mount / "..data").symlink_to("..1")
    for name in ("tls.crt", "tls.key", "ca.crt"):
        (mount / name).symlink_to(f"..data/{name}")
    files = TlsDirectory(mount)
    tls = ServerTls(TlsFiles(files.cert, files.key, files.ca))
    assert tls.current().authorities == first.pem
    (mount / "..next").symlink_to("..2")
    os.replace(mount / "..next", mount / "..data")
    assert tls.current().authorities == second.pem


def test_the_time_until_certificates_expire_is_told(tmp_path: Path) -> None:
    authority, now_s = Authority(), time.time()
    files = TlsDirectory(tmp_path / "x").write(authority.issue(NAME, until_s=100.0), authority.pem)
    validities = ServerTls(TlsFiles(files.cert, files.key, files.ca)).validities()
    until = {name: validity.until_unix_s for name, validity in validities.items()}
    assert until == pytest.approx({"certificate": now_s + 100, "client_ca": now_s + LIFETIME_S}, abs=60.0)
    assert ServerTls(TlsFiles(files.cert, files.key)).validities().keys() == {"certificate"}


def test_a_server_does_not_start_with_files_that_cannot_be_used(tmp_path: Path) -> None:
    authority = Authority()
    files = TlsDirectory(tmp_path / "x").write(authority.issue(NAME), authority.pem)
    other = TlsDirectory(tmp_path / "y").write(authority.issue(NAME), authority.pem)
    for broken in (TlsFiles(files.cert, other.key), TlsFiles(files.key, files.cert), TlsFiles("/absent", files.key)):
        with pytest.raises(TlsFileError) as caught:
            ServerTls(broken)
        assert "\n" not in str(caught.value)
        assert "BEGIN" not in str(caught.value)


async def test_the_port_for_probes_has_health_alone_without_tls(tmp_path: Path) -> None:
    authority = Authority()
    files = TlsDirectory(tmp_path / "x").write(authority.issue(NAME), authority.pem)
    port = free_port()
    tls = ServerTls(TlsFiles(files.cert, files.key, files.ca))
    server = GrpcServer("127.0.0.1", 0, services=["Test"], tls=tls, health_port=port)
    handler: Any = grpc.unary_unary_rpc_method_handler(lambda request, context: b"", bytes)
    server.grpc.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("Test", {"Do": handler}),))
    await server.start()
    try:
        async with open_channel(f"127.0.0.1:{port}", ALONE) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=LIVENESS), timeout=60)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
            for method in ("/Test/Do", "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"):
                ask: Any = channel.unary_unary(method)
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await ask(b"", timeout=60)
                assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    finally:
        await server.stop(0)


@asynccontextmanager
async def site(context: ssl.SSLContext) -> AsyncIterator[int]:
    """The port of a server that sends back what it gets, and uses ssl as HTTP servers do."""
    ended: set[asyncio.Task[None] | None] = set()

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ended.add(asyncio.current_task())
        try:
            while data := await reader.read(100):
                writer.write(data)
        finally:
            await closed(writer)

    server = await asyncio.start_server(echo, "127.0.0.1", 0, ssl=context)
    yield int(server.sockets[0].getsockname()[1])
    server.close()
    await asyncio.gather(*filter(None, ended))


async def closed(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


def visitor(files: TlsDirectory) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=files.ca)
    context.load_cert_chain(files.cert, files.key)
    context.set_alpn_protocols(["h2", "http/1.1"])
    return context


@asynccontextmanager
async def visit(port: int, context: ssl.SSLContext) -> AsyncIterator[ssl.SSLObject]:
    """A connection over which bytes go to and fro, at the beginning and at the end. Raises OSError."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname=NAME)

    async def ask() -> None:
        writer.write(b"a")
        if await reader.read(1) != b"a":
            raise ConnectionError("closed by the server")

    try:
        await ask()
        yield writer.get_extra_info("ssl_object")
        await ask()
    finally:
        await closed(writer)


def common_name(connection: ssl.SSLObject) -> str:
    certificate: Any = connection.getpeercert()
    return str(certificate["subject"][0][0][1])


async def failure(port: int, context: ssl.SSLContext) -> str:
    with pytest.raises(OSError) as caught:  # noqa: PT011 -- the caller checks what it says
        async with visit(port, context):
            pass
    return str(caught.value)


async def test_an_http_server_meets_new_connections_with_the_new_certificate_and_authority(tmp_path: Path) -> None:
    first, second = Authority("first"), Authority("second")
    files = TlsDirectory(tmp_path / "server").write(first.issue(NAME, common_name="old"), first.pem)
    client = TlsDirectory(tmp_path / "client").write(first.issue("c"), first.pem)
    async with site(ServerTls(TlsFiles(files.cert, files.key, files.ca)).ssl_context()) as port:
        old = visitor(client)
        async with visit(port, old) as connection:
            assert common_name(connection) == "old"
            assert connection.selected_alpn_protocol() == "http/1.1"
            files.write(second.issue(NAME, common_name="new"), second.pem)
            assert "CERTIFICATE_VERIFY_FAILED" in await failure(port, old)
            old.load_verify_locations(cadata=second.pem.decode())
            said = await failure(port, old)
            assert "CERTIFICATE_VERIFY_FAILED" not in said, "it is the server that refuses"
            client.write(second.issue("c"), second.pem)
            async with visit(port, visitor(client)) as renewed:
                assert common_name(renewed) == "new"


async def test_an_http_server_serves_clients_of_tls_1_2(tmp_path: Path) -> None:
    authority = Authority()
    files = TlsDirectory(tmp_path / "server").write(authority.issue(NAME), authority.pem)
    context = ServerTls(TlsFiles(files.cert, files.key)).ssl_context()
    assert context.minimum_version == ssl.TLSVersion.TLSv1_2
    client = ssl.create_default_context(cafile=files.ca)
    client.maximum_version = ssl.TLSVersion.TLSv1_2
    async with site(context) as port, visit(port, client) as connection:
        assert connection.version() == "TLSv1.2"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "[::1]", "localhost", "LOCALHOST"])
def test_loopback_is_what_stays_on_this_machine(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::", "10.0.0.1", "worker-0", "localhost.example.com", "dns", "unix"])
def test_everything_else_is_elsewhere(host: str) -> None:
    assert not is_loopback(host)
