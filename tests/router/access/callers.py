"""A router with identities of all kinds: keys in a real file and tokens of an issuer with a real JWKS file."""

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx2

from tests.router.cluster import PATIENCE_S, Cluster, Refusal, cluster, refusal
from tests.router.fake_worker import FakeWorker
from tests.router.identity import issuer, key_rig
from trunkline.v1.fleet_pb2_grpc import FleetServiceStub
from trunkline.v1.inference_pb2 import GenerateRequest, GenerateResponse
from trunkline.v1.inference_pb2_grpc import InferenceServiceStub
from trunkline_router.access.access import Access, Tenants
from trunkline_router.access.identity.authenticator import Authenticator, KeyFileSource
from trunkline_router.access.identity.bearer_token import BearerTokens
from trunkline_router.access.identity.jwks import JwksFile
from trunkline_router.access.identity.needed_roles import Open
from trunkline_router.access.keys.new_key import new_key
from trunkline_router.edge.http_call import Edge

NOW_UNIX_S = issuer.NOW_UNIX_S
SALT_KEY = b"a secret of the fleet, 32 bytes!"

Headers = dict[str, str]


def bearer(credential: str, tenant: str = "") -> Headers:
    """Headers, which are also metadata."""
    return {"authorization": f"Bearer {credential}"} | ({"x-trunkline-tenant": tenant} if tenant else {})


@dataclass
class Keys:
    """API keys, and the file that has them."""

    path: Path
    records: list[dict[str, Any]] = field(default_factory=list)

    def add(self, *, revoked: bool = False, expires_unix_s: float | None = None, **terms: Any) -> str:
        """A new key in the clear, of the tenant acme unless `terms` name another."""
        key = new_key()
        record = key_rig.record(key, expires_unix_s=expires_unix_s, **terms)
        if revoked:
            record["revoked"] = record["created"]
        self.records.append(record)
        key_rig.write(self.path, *self.records)
        return key.credential


class Router:
    """A router, and clients of it that present credentials."""

    def __init__(
        self, inner: Cluster, http: httpx2.AsyncClient, channel: grpc.aio.Channel, authenticator: Authenticator
    ) -> None:
        self.inner = inner
        self.authenticator = authenticator
        self.http = http
        self.channel = channel
        self.stub: Any = InferenceServiceStub(channel)
        self.fleet: Any = FleetServiceStub(channel)

    async def generate(self, headers: Headers, **fields: Any) -> list[GenerateResponse]:
        call = self.stub.Generate(GenerateRequest(**fields), metadata=tuple(headers.items()), timeout=PATIENCE_S)
        return [response async for response in call]

    async def read_keys(self, keys: Keys) -> None:
        """Writes the file of keys, and reads it again as the router does when it has changed."""
        key_rig.write(keys.path, *keys.records)
        await self.authenticator.start()

    async def refused(self, headers: Headers, **fields: Any) -> Refusal:
        """How a Generate call that must not succeed ends."""
        call = self.stub.Generate(GenerateRequest(**fields), metadata=tuple(headers.items()), timeout=PATIENCE_S)
        return await refusal(call)

    async def complete(self, headers: Headers, **body: Any) -> Any:
        """The response to a completion, whatever its status."""
        return await self.http.post("/v1/completions", json={"model": "tiny", **body}, headers=headers)


@asynccontextmanager
async def router_of(
    keys: Keys,
    *workers: FakeWorker,
    tenants: Tenants | None = None,
    allows_anonymous: bool = False,
    opened: frozenset[Open] = frozenset(),
    steady_s: Callable[[], float] = time.monotonic,
    cpu_s: Callable[[], float] = time.thread_time,
    **options: Any,
) -> AsyncIterator[Router]:
    """The clocks of keys and tokens stand at NOW_UNIX_S."""
    if not keys.path.exists():
        key_rig.write(keys.path, *keys.records)
    jwks = keys.path.with_name("jwks.json")
    jwks.write_bytes(issuer.jwks("ed25519", "rsa"))

    def now_unix_s() -> float:
        return NOW_UNIX_S

    tokens = BearerTokens(JwksFile(str(jwks)), issuer.RULES, now_unix_s, steady_s=steady_s, cpu_s=cpu_s)
    authenticator = Authenticator([KeyFileSource(str(keys.path))], tokens, now_unix_s=now_unix_s)
    await authenticator.start()
    access = Access(
        tenants, authenticator.identify, allows_anonymous=allows_anonymous, opened=opened, salt_key=SALT_KEY
    )
    options.setdefault("edge", Edge)
    async with cluster(*workers, access=access, **options) as inner:
        url = f"http://127.0.0.1:{inner.http_port}"
        async with (
            httpx2.AsyncClient(base_url=url, timeout=PATIENCE_S, trust_env=False) as http,
            grpc.aio.insecure_channel(f"127.0.0.1:{inner.port}") as channel,
        ):
            yield Router(inner, http, channel, authenticator)
