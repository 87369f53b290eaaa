"""Links to workers with TLS: whose certificates a router accepts, and where plaintext is refused."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import grpc
import pytest

from tests.certificates import Authority, TlsDirectory
from tests.router.cluster import until
from tests.worker.front.served_front import MODEL
from trunkline.grant import GrantKeys
from trunkline.proof import proof_metadata
from trunkline.status import INTERNAL, RequestRefused
from trunkline.tls import ClientTls, open_channel
from trunkline.v1.worker_pb2 import (
    DrainRequest,
    GetModelRequest,
    GetStatsRequest,
    UndrainRequest,
    WatchCacheRequest,
)
from trunkline.v1.worker_pb2 import WorkerServiceGenerateRequest as Generate
from trunkline.v1.worker_pb2_grpc import WorkerServiceServicer, WorkerServiceStub, add_WorkerServiceServicer_to_server
from trunkline_router.prompts.helper_pool import Helpers
from trunkline_router.routing.prefix_index import PrefixIndex
from trunkline_router.workers.link_context import LinkContext, LinkSecurity
from trunkline_router.workers.tokenizer_pool import Tokenizers
from trunkline_router.workers.worker_link import WorkerLink
from trunkline_runtime.server import GrpcServer
from trunkline_runtime.tls import ServerTls, TlsFiles
from trunkline_worker.front.door import CallAuthorizer, Door

KEY = b"k" * 32
ROUTER, WORKER = "router.test", "worker.test"
CODE_UNIMPLEMENTED = 12
ALONE = (("grpc.use_local_subchannel_pool", 1),)


class Described(WorkerServiceServicer):
    """A worker that describes its model, and refuses everything else in a way that no door does."""

    calls = 0

    async def refuse(self, request: Any, context: Any) -> Any:
        raise RequestRefused(CODE_UNIMPLEMENTED, INTERNAL, "passed the door")

    GetStats = Drain = Undrain = refuse

    async def refuse_stream(self, request: Any, context: Any) -> AsyncIterator[Any]:
        raise RequestRefused(CODE_UNIMPLEMENTED, INTERNAL, "passed the door")
        yield

    Session = WatchCache = Generate = GetTokenizer = refuse_stream  # type: ignore[assignment]  # its argument has a name

    async def GetModel(self, request: Any, context: Any) -> Any:
        self.calls += 1
        return MODEL


class Guarded:
    """A worker's door and port, with real certificates."""

    def __init__(self, folder: Path, *, key: bytes = b"") -> None:
        self.folder = folder
        self.authority, self.other = Authority("one"), Authority("two")
        self.files = self.write("worker", self.authority.issue(WORKER))
        tls = ServerTls(TlsFiles(self.files.cert, self.files.key, self.files.ca))
        authorizer = CallAuthorizer(GrantKeys(key), MODEL.worker_id, MODEL.epoch, lambda: 0, frozenset([ROUTER]))
        self.server = GrpcServer("127.0.0.1", 0, services=[], gate=Door(authorizer, MODEL), tls=tls)
        self.service = Described()
        add_WorkerServiceServicer_to_server(self.service, self.server.grpc)

    def write(self, name: str, pair: Any, authority: Authority | None = None) -> TlsDirectory:
        return TlsDirectory(self.folder / name).write(pair, (authority or self.authority).pem)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server.port}"


@asynccontextmanager
async def guarded(folder: Path, *, key: bytes = b"") -> AsyncIterator[Guarded]:
    made = Guarded(folder, key=key)
    await made.server.start()
    try:
        yield made
    finally:
        await made.server.stop(0)


def client_of(files: TlsDirectory, name: str = WORKER) -> ClientTls:
    return ClientTls(files.ca, files.cert, files.key, name)


async def codes(worker: Guarded, files: TlsDirectory, metadata: Any = ()) -> dict[str, grpc.StatusCode]:
    """How calls of each method end for a caller with this certificate."""
    ended = {}
    async with open_channel(worker.address, ALONE, client_of(files)) as channel:
        stub: Any = WorkerServiceStub(channel)
        calls = {
            "GetModel": stub.GetModel(GetModelRequest(), timeout=60),
            "GetStats": stub.GetStats(GetStatsRequest(), timeout=60, metadata=metadata),
            "Drain": stub.Drain(DrainRequest(), timeout=60, metadata=metadata),
            "Undrain": stub.Undrain(UndrainRequest(), timeout=60, metadata=metadata),
            "WatchCache": stub.WatchCache(WatchCacheRequest(), timeout=60, metadata=metadata),
            # Sends nothing: a message that comes after the refusal is an error of its own.
            "Session": stub.Session(timeout=60, metadata=metadata),
            "Generate": stub.Generate(Generate(), timeout=60),
        }
        for method, call in calls.items():
            ended[method] = await call.code()
    return ended


OPEN, REFUSED, NO_PROOF = (
    grpc.StatusCode.UNIMPLEMENTED,  # the call has passed the door
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNAUTHENTICATED,
)
OF_ROUTERS = ("GetStats", "Drain", "Undrain", "WatchCache", "Session")


async def test_a_worker_that_knows_its_routers_names_serves_them_alone(tmp_path: Path) -> None:
    async with guarded(tmp_path) as worker:
        router = await codes(worker, worker.write("r", worker.authority.issue("x.test", ROUTER)))
        assert router == {"GetModel": grpc.StatusCode.OK, **dict.fromkeys((*OF_ROUTERS, "Generate"), OPEN)}
        for stranger in (
            worker.authority.issue("client.test"),
            worker.authority.issue("client.test", common_name=ROUTER),  # a name beside alternative names is no name
            worker.authority.issue(f"x.{ROUTER}"),
        ):
            told = await codes(worker, worker.write("c", stranger))
            assert told == {"GetModel": grpc.StatusCode.OK, **dict.fromkeys((*OF_ROUTERS, "Generate"), REFUSED)}
        by_common_name = await codes(worker, worker.write("n", worker.authority.issue(common_name=ROUTER)))
        assert by_common_name == router


async def test_a_worker_with_names_and_a_key_asks_for_both_and_direct_clients_need_a_grant_instead(
    tmp_path: Path,
) -> None:
    proof = {
        method: proof_metadata(KEY, method, worker_id=MODEL.worker_id, epoch=MODEL.epoch, now_unix_ms=0)
        for method in OF_ROUTERS
    }
    async with guarded(tmp_path, key=KEY) as worker:
        router = worker.write("r", worker.authority.issue(ROUTER))
        client = worker.write("c", worker.authority.issue("client.test"))
        without = await codes(worker, router)
        assert {without[method] for method in OF_ROUTERS} == {NO_PROOF}
        for method in OF_ROUTERS:
            assert (await codes(worker, router, proof[method]))[method] is OPEN
            assert (await codes(worker, client, proof[method]))[method] is REFUSED
        assert (await codes(worker, client))["Generate"] is OPEN, "the grant desk decides"


@asynccontextmanager
async def link_to(address: str, security: LinkSecurity) -> AsyncIterator[WorkerLink]:

    helpers = Helpers()
    context = LinkContext("router-1", Tokenizers(helpers), PrefixIndex(), lambda: None, Random(0), security=security)
    link = WorkerLink(address, context)
    running = asyncio.create_task(link.run())
    try:
        yield link
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await helpers.close()


async def problem_of(address: str, security: LinkSecurity) -> str:
    """What a link says once it has tried."""
    async with link_to(address, security) as link:
        await until(lambda: link.problem != "not connected yet")
        return link.problem


async def test_a_router_connects_to_workers_of_its_authority_and_with_the_agreed_name(tmp_path: Path) -> None:
    async with guarded(tmp_path) as worker:
        router = worker.write("r", worker.authority.issue(ROUTER))
        assert "UNAVAILABLE" in await problem_of(worker.address, LinkSecurity(client_of(router, "other.test")))
        assert "UNAVAILABLE" in await problem_of(worker.address, LinkSecurity(client_of(router, "")))
        trusting = worker.write("t", worker.authority.issue(ROUTER), worker.other)
        assert "VERIFY_FAILED" in await problem_of(worker.address, LinkSecurity(client_of(trusting)))
        assert not worker.service.calls
        async with link_to(worker.address, LinkSecurity(client_of(router))):
            await until(lambda: worker.service.calls > 0)


async def test_a_links_next_connection_uses_the_certificate_that_the_files_have_then(tmp_path: Path) -> None:
    async with guarded(tmp_path) as worker:
        files = worker.write("r", worker.other.issue(ROUTER))
        async with link_to(worker.address, LinkSecurity(client_of(files))) as link:
            await until(lambda: "UNAVAILABLE" in link.problem)
            assert not worker.service.calls
            files.put(files.cert, b"")
            await until(lambda: files.cert in link.problem)
            worker.write("r", worker.authority.issue(ROUTER))
            await until(lambda: worker.service.calls > 0)


ELSEWHERE = "192.0.2.1:50061"  # an address of documentation: it leads nowhere


async def test_a_link_without_tls_is_not_opened_to_workers_elsewhere() -> None:
    said = await problem_of(ELSEWHERE, LinkSecurity())
    assert said == LinkSecurity().problem(ELSEWHERE)
    assert "--worker-tls-ca" in said
    assert "--allow-plaintext" in said


@pytest.mark.parametrize(
    ("address", "security"),
    [
        (ELSEWHERE, LinkSecurity(allow_plaintext=True)),
        (ELSEWHERE, LinkSecurity(ClientTls())),
        ("127.0.0.1:1", LinkSecurity()),
        ("[::1]:1", LinkSecurity()),
        ("localhost:1", LinkSecurity()),
    ],
)
def test_links_may_be_opened_with_tls_on_loopback_or_by_the_switch(address: str, security: LinkSecurity) -> None:
    assert security.problem(address) == ""
