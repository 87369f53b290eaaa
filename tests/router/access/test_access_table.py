"""Every RPC and every HTTP endpoint of a router, with every kind of credential: allowed or refused by one rule."""

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from grpc_health.v1.health_pb2 import HealthCheckRequest
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest
from grpc_reflection.v1alpha.reflection_pb2_grpc import ServerReflectionStub

from tests.router.access.callers import NOW_UNIX_S, Headers, Keys, Router, bearer, router_of
from tests.router.cluster import PATIENCE_S, Refusal
from tests.router.fake_worker import FakeWorker
from tests.router.identity import issuer
from trunkline.v1.inference_pb2 import GenerateRequest, GrantRequest
from trunkline_router.access.access import Access, NotAdmitted
from trunkline_router.access.identity.api_keys import ApiKey
from trunkline_router.access.identity.identity import Role
from trunkline_router.access.identity.needed_roles import (
    METHODS,
    PATHS,
    Needed,
    Open,
)
from trunkline_router.access.keys.new_key import new_key
from trunkline_router.assembly import build
from trunkline_router.edge.http_call import Edge
from trunkline_router.edge.live.fleet_endpoints import FleetEndpoints
from trunkline_router.edge.live.page_files import PageFiles
from trunkline_router.http_app import http_app
from trunkline_router.http_settings import HttpSettings
from trunkline_router.observe.watch.worker_drain import WorkerDrain
from trunkline_router.settings import RouterSettings
from trunkline_runtime.server import LIVENESS
from trunkline_runtime.telemetry.exposition import FreshAnswers
from trunkline_runtime.tracing import open_tracing

GRANT_KEY = b"the key of grants, of 32 bytes .."
NAMED = {"model": "tiny", "response": "resp_1", "request": "none", "worker": "none", "file": "main.js"}
NOT_FOUND = {f"{what}_not_found" for what in ("response", "request", "worker", "page_file")}
MODEL, PROMPT = "tiny", "a prompt that no refused call may bring to a worker"

ALLOWED, UNAUTHENTICATED, FORBIDDEN = "allowed", "UNAUTHENTICATED", "FORBIDDEN"
CASES = (
    *("no credentials", "wrong key", "unknown key", "not a key", "revoked key", "expired key"),
    *("expired token", "forged token", "other tenant named", "right role", "right role by token", "wrong role"),
)
INVALID = frozenset(CASES[1:8])

# Requests that a worker would get. Calls that are not listed send an empty message or object: they are allowed if they
# are answered, or refused for what they ask.
MESSAGES: dict[str, Message] = {
    "/trunkline.v1.InferenceService/Generate": GenerateRequest(text=PROMPT),
    "/trunkline.v1.InferenceService/Grant": GrantRequest(request=GenerateRequest(text=PROMPT)),
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": ServerReflectionRequest(list_services=""),
}
BODIES: dict[str, dict[str, Any]] = {
    "POST /v1/completions": {"model": MODEL, "prompt": PROMPT},
    "POST /v1/chat/completions": {"model": MODEL, "messages": [{"role": "user", "content": PROMPT}]},
    "POST /v1/messages": {"model": MODEL, "max_tokens": 4, "messages": [{"role": "user", "content": PROMPT}]},
}


ALWAYS_OPEN = Needed(is_open=True)


def expected(needed: Needed, case: str, *, anonymous: bool, opened: frozenset[Open]) -> str:
    """The rule."""
    if needed.is_open or needed.open in opened:
        return ALLOWED
    if case == "no credentials":
        if not anonymous:
            return UNAUTHENTICATED
        is_for_users = Role.USER in needed.roles and not needed.shows_cache
        return ALLOWED if is_for_users or not needed.roles else FORBIDDEN
    if case in INVALID:
        return UNAUTHENTICATED
    if case == "other tenant named" or (case == "wrong role" and needed.roles):
        return FORBIDDEN
    return ALLOWED


class Credentials:
    """Headers for each case."""

    def __init__(self, keys: Keys) -> None:
        self._of_role = {role: keys.add(roles=[role.value]) for role in Role}
        needs = {needed.roles for needed in (*METHODS.values(), *PATHS.values())} - {frozenset()}
        self._without = {
            roles: keys.add(roles=[other.value for other in Role if other not in roles]) for roles in needs
        }
        revoked, expired = keys.add(revoked=True), keys.add(expires_unix_s=NOW_UNIX_S - 1)
        head, _, body = issuer.token().partition(".")
        known = ApiKey.parse(self._of_role[Role.USER])
        assert known is not None
        claims, _, signature = body.partition(".")
        self._fixed: dict[str, Headers] = {
            "no credentials": {},
            "wrong key": bearer(ApiKey(known.key_id, new_key().secret).credential),
            "unknown key": bearer(new_key().credential),
            "not a key": bearer("sk-of-another-service"),
            "revoked key": bearer(revoked),
            "expired key": bearer(expired),
            "expired token": bearer(issuer.token(issuer.claims(exp=NOW_UNIX_S - 600))),
            "forged token": bearer(f"{head}.{claims}.{signature[::-1]}"),
        }

    def headers(self, needed: Needed, case: str) -> Headers:
        if case in self._fixed:
            return self._fixed[case]
        roles = needed.roles or frozenset({Role.SCRAPER})
        role = min(roles)
        if case == "wrong role":
            return bearer(self._without.get(roles) or self._of_role[Role.USER])
        if case == "right role by token":
            return bearer(issuer.token(issuer.claims(roles=[role.value, "a role of another service"])))
        return bearer(self._of_role[role], tenant="another-tenant" if case == "other tenant named" else "")


async def rpc(router: Router, method: str, headers: Headers, raw: bytes) -> str:
    """The outcome of a call."""
    # One message, and then the client's side ends: so may calls of each kind begin.
    ask: Any = router.channel.unary_stream(method)
    call = ask(raw, metadata=tuple(headers.items()), timeout=PATIENCE_S)
    with suppress(grpc.aio.AioRpcError):
        await call.read()
    if not call.done():
        call.cancel()
        return ALLOWED
    if await call.code() is grpc.StatusCode.OK:
        return ALLOWED
    error = grpc.aio.AioRpcError(
        await call.code(), await call.initial_metadata(), await call.trailing_metadata(), details=await call.details()
    )
    refused = Refusal(error)
    assert refused.code not in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.UNKNOWN), (
        f"{method}: {refused.code} {refused.message}"
    )
    return refused.reason if refused.reason in (UNAUTHENTICATED, FORBIDDEN) else ALLOWED


async def endpoint(router: Router, name: str, headers: Headers, body: dict[str, Any]) -> str:
    """The outcome of a request."""
    method, path = name.split(" ")
    path = re.sub(r"{(\w+)(:path)?}", lambda found: NAMED[found[1]], path)
    content = json.dumps(body).encode() if method == "POST" else b""
    type_of = {"content-type": "application/json"} if content else {}
    asked = router.http.stream(method, path, content=content, headers=headers | type_of)
    async with asked as response:
        if response.headers["content-type"].startswith("text/event-stream"):
            return ALLOWED  # it does not end by itself
        await response.aread()
    code = response.json()["error"].get("code") if response.status_code >= 400 and method != "HEAD" else ""
    if response.status_code == 401:
        assert response.headers["www-authenticate"] == "Bearer", name
        return UNAUTHENTICATED
    if response.status_code == 403:
        return FORBIDDEN
    known = (
        response.status_code in (200, 400)
        or code in NOT_FOUND
        or (response.status_code, method)
        == (
            404,
            "HEAD",  # it has no body that tells what was not found
        )
    )
    assert known, f"{name}: {response.status_code} {response.text}"
    return ALLOWED


def rows() -> Iterator[tuple[str, Needed, bytes | dict[str, Any]]]:
    """Each call with what it needs and what it sends: bytes over gRPC, an object over HTTP."""
    for method, needed in METHODS.items():
        message = MESSAGES.get(method)
        yield method, needed, b"" if message is None else message.SerializeToString()
    for method in ("Check", "Watch"):
        yield f"/grpc.health.v1.Health/{method}", ALWAYS_OPEN, HealthCheckRequest(service=LIVENESS).SerializeToString()
    for name, path_needs in PATHS.items():
        yield name, path_needs, BODIES.get(name, {})
        if name.startswith("GET "):
            yield name.replace("GET", "HEAD"), path_needs, {}


@pytest.mark.parametrize("anonymous", [False, True], ids=["closed", "anonymous"])
@pytest.mark.parametrize("opened", [frozenset(), frozenset(Open)], ids=["nothing-opened", "all-opened"])
async def test_each_call_is_allowed_or_refused_by_the_rule(
    tmp_path: Path, anonymous: bool, opened: frozenset[Open]
) -> None:
    keys = Keys(tmp_path / "keys.json")
    credentials = Credentials(keys)
    worker = FakeWorker("w", grant_key=GRANT_KEY)
    wrong, num_allowed = [], 0
    async with router_of(keys, worker, grant_key=GRANT_KEY, allows_anonymous=anonymous, opened=opened) as router:
        for name, needed, sent in rows():
            for case in CASES:
                headers = credentials.headers(needed, case)
                before = len(worker.submits)
                if isinstance(sent, bytes):
                    found = await rpc(router, name, headers, sent)
                else:
                    found = await endpoint(router, name, headers, sent)
                wanted = expected(needed, case, anonymous=anonymous, opened=opened)
                num_allowed += wanted == ALLOWED
                if found != wanted:
                    wrong.append(f"{name}, {case}: {found}, not {wanted}")
                if wanted != ALLOWED and len(worker.submits) > before:
                    wrong.append(f"{name}, {case}: a worker got the request")
        assert len(worker.submits) > len(BODIES), "allowed requests did reach the worker"
    assert not wrong, "\n".join(wrong)
    assert num_allowed > len(METHODS) + len(PATHS)


async def test_the_table_lists_exactly_what_a_router_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    served: set[str] = set()
    server_class = type(grpc.aio.server())
    add = server_class.add_generic_rpc_handlers

    def record(server: Any, handlers: Any) -> None:
        for handler in handlers:
            served.update(handler._method_handlers)
        add(server, handlers)

    monkeypatch.setattr(server_class, "add_generic_rpc_handlers", record)
    settings = RouterSettings(("127.0.0.1:1",), port=0, http=HttpSettings(http_port=0))
    built = build(settings, Access(), open_tracing("trunkline-router"))
    await built.server.stop(0)
    await built.shared.close()
    await built.helpers.close()
    assert served == set(METHODS)


async def test_the_table_lists_exactly_the_services_that_reflection_tells(tmp_path: Path) -> None:
    async with router_of(Keys(tmp_path / "keys.json"), FakeWorker("w"), opened=frozenset(Open)) as router:
        stub: Any = ServerReflectionStub(router.channel)
        asked = iter([ServerReflectionRequest(list_services="")])
        answers = [answer async for answer in stub.ServerReflectionInfo(asked, timeout=PATIENCE_S)]
    told = {service.name for service in answers[0].list_services_response.service}
    assert told == {method.split("/")[1] for method in METHODS}


async def test_the_table_lists_exactly_the_paths_that_a_router_serves(tmp_path: Path) -> None:
    async with router_of(Keys(tmp_path / "keys.json"), FakeWorker("w")) as router:
        inner = router.inner
        page = FleetEndpoints(inner.watch, WorkerDrain(inner.inference.pools), PageFiles())
        answers = FreshAnswers(inner.collect)
        app = http_app(Edge(inner.inference, Access(), inner.gate), lambda: True, answers, page)
    assert set(app.endpoints) == set(PATHS)


async def test_a_path_or_method_that_is_not_in_the_table_is_not_served(tmp_path: Path) -> None:
    keys = Keys(tmp_path / "keys.json")
    key = keys.add(roles=[role.value for role in Role])
    async with router_of(keys, FakeWorker("w")) as router:
        for headers in ({}, bearer(key)):
            for path in (
                "/index.html",
                "/page",
                "/page/",
                "/fleet",
                "/metrics/",
                "/v1",
                "/v1/files",
                "/v1/models/../../ready/",
                "//ready",
                "/docs",
            ):
                url = f"http://127.0.0.1:{router.http.base_url.port}{path}"  # httpx takes "//" for the begin of a host
                assert (await router.http.get(url, headers=headers)).status_code in (307, 404), path
            for method in ("PUT", "PATCH", "OPTIONS", "TRACE"):
                assert (await router.http.request(method, "/v1/completions", headers=headers)).status_code == 405
        missing: Any = router.channel.unary_unary("/trunkline.v1.InferenceService/Other")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await missing(b"", metadata=tuple(bearer(key).items()), timeout=PATIENCE_S)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_missing_credentials_are_told_in_the_words_of_each_protocol(tmp_path: Path) -> None:
    async with router_of(Keys(tmp_path / "keys.json"), FakeWorker("w")) as router:
        over_grpc = await router.refused({}, text=PROMPT)
        assert (over_grpc.reason, "the metadata 'authorization" in over_grpc.message) == (UNAUTHENTICATED, True)
        for method, path in (("POST", "/v1/completions"), ("POST", "/v1/messages"), ("GET", "/version")):
            response = await router.http.request(method, path)
            message = response.json()["error"]["message"]
            assert response.status_code == 401, path
            assert "the header 'Authorization: Bearer KEY' or 'x-api-key: KEY'" in message
            assert "metadata" not in message


def test_liveness_and_the_files_of_the_live_page_alone_are_always_open() -> None:
    assert [name for name, needed in PATHS.items() if needed.is_open] == ["GET /", "GET /page/{file}", "GET /health"]
    assert not [method for method, needed in METHODS.items() if needed.is_open]
    every = (*METHODS.values(), *PATHS.values())
    assert all(needed.roles or needed.open or needed.is_open for needed in every), "no entry is empty by mistake"


def test_an_rpc_that_has_not_passed_the_gate_has_no_caller() -> None:
    with pytest.raises(NotAdmitted):
        Access().admitted()
