"""One tenant learns nothing of another's prompts from the cache: neither by cached tokens nor by forged block names."""

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.router.access.callers import SALT_KEY, Headers, Keys, Router, bearer, router_of
from tests.router.cluster import refusal
from tests.router.fake_worker import FakeWorker
from tests.router.identity import issuer
from trunkline.block_hash import prompt_hashes, root_hash
from trunkline.v1.fleet_pb2 import ExplainRouteRequest
from trunkline.v1.inference_pb2 import GenerateRequest, GrantRequest
from trunkline_router.access.access import Caller, Tenant
from trunkline_router.access.identity.fleet_secret import derived_key
from trunkline_router.serving import SALT_PURPOSE

GRANT_KEY = b"the key of grants, of 32 bytes .."
MODEL, PROMPT = "tiny", "what one tenant asks, and another guesses"
CHAT = [{"role": "user", "content": PROMPT}]
Usage = Mapping[str, Any]


async def over_grpc(router: Router, headers: Headers) -> int:
    responses = await router.generate(headers, text=PROMPT)
    assert responses[-1].usage.cached_tokens == responses[0].prompt.cached_tokens
    return responses[0].prompt.cached_tokens


def _of_openai(usage: Usage) -> int:
    return int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)


def _of_anthropic(usage: Usage) -> int:
    return int(usage["cache_read_input_tokens"])


def _of_responses(usage: Usage) -> int:
    return int(usage["input_tokens_details"]["cached_tokens"])


def over_http(
    path: str, told: Callable[[Usage], int], body: Mapping[str, Any]
) -> Callable[[Router, Headers], Awaitable[int]]:
    async def ask(router: Router, headers: Headers) -> int:
        response = await router.http.post(path, json={"model": MODEL, **body}, headers=headers)
        assert response.status_code == 200, response.text
        in_header = int(response.headers.get("x-trunkline-cached-tokens", "0"))
        in_body = told(response.json()["usage"])
        assert in_header == in_body
        assert ("x-trunkline-worker" in response.headers) == ("x-trunkline-cached-tokens" in response.headers)
        return in_body

    return ask


WAYS: dict[str, Callable[[Router, Headers], Awaitable[int]]] = {
    "gRPC": over_grpc,
    "completions": over_http("/v1/completions", _of_openai, {"prompt": PROMPT}),
    "chat": over_http("/v1/chat/completions", _of_openai, {"messages": CHAT}),
    "messages": over_http("/v1/messages", _of_anthropic, {"messages": CHAT, "max_tokens": 4}),
    "responses": over_http("/v1/responses", _of_responses, {"input": PROMPT}),
}


@pytest.mark.parametrize("way", WAYS)
async def test_tokens_are_cached_within_a_tenant_and_not_across_tenants(tmp_path: Path, way: str) -> None:
    keys, ask = Keys(tmp_path / "keys.json"), WAYS[way]
    acme, other = bearer(keys.add(tenant="acme")), bearer(keys.add(tenant="other"))
    blind = bearer(keys.add(tenant="acme", sees_cache=False))
    of_issuer = bearer(issuer.token(issuer.claims(tenant="acme")))
    gateway = keys.add(tenant="gateway", acts_for=["acme"])
    async with router_of(keys, FakeWorker("w"), allows_anonymous=True) as router:
        assert await ask(router, acme) == 0
        assert await ask(router, other) == 0, "another tenant's prompt"
        assert await ask(router, bearer(gateway)) == 0
        assert await ask(router, acme) > 0
        assert await ask(router, of_issuer) > 0, "another identity of the tenant"
        assert await ask(router, bearer(gateway, "acme")) > 0
        assert await ask(router, other) > 0
        assert await ask(router, blind) == 0, "may not see the cache"
        assert [await ask(router, {}) for _ in range(2)] == [0, 0], "anonymous callers may not see the cache"


STREAMED: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": PROMPT, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    "/v1/chat/completions": {"messages": CHAT, "stream_options": {"include_usage": True}},
    "/v1/messages": {"messages": CHAT, "max_tokens": 4},
    "/v1/responses": {"input": PROMPT},
}


@pytest.mark.parametrize("path", STREAMED)
async def test_streams_hide_cache_and_worker_too(tmp_path: Path, path: str) -> None:
    keys = Keys(tmp_path / "keys.json")
    sees, blind = bearer(keys.add()), bearer(keys.add(sees_cache=False))
    async with router_of(keys, FakeWorker("the-worker-1")) as router:

        async def ask(headers: Headers) -> str:
            body = {"model": MODEL, "stream": True, **STREAMED[path]}
            response = await router.http.post(path, json=body, headers=headers)
            assert response.status_code == 200, response.text
            return f"{response.headers} {response.text}"

        first, seen, hidden = await ask(sees), await ask(sees), await ask(blind)
    assert "the-worker-1" in seen
    assert first != seen
    assert "the-worker-1" not in hidden
    assert "x-trunkline-cached" not in hidden
    for name in ('"cached_tokens":', '"cache_read_input_tokens":'):
        for piece in hidden.split(name)[1:]:
            assert piece.lstrip()[0] == "0", f"{name}{piece[:10]}"


async def test_identities_that_may_not_see_the_cache_see_it_nowhere_over_grpc(tmp_path: Path) -> None:
    keys = Keys(tmp_path / "keys.json")
    sees = bearer(keys.add(roles=["user", "operator"]))
    blind = bearer(keys.add(roles=["user", "operator"], sees_cache=False))
    asked = GenerateRequest(text=PROMPT)
    async with router_of(keys, FakeWorker("the-worker-1", grant_key=GRANT_KEY), grant_key=GRANT_KEY) as router:
        await router.generate(sees, text=PROMPT)
        assert "the-worker-1" in str(await router.generate(sees, text=PROMPT))
        hidden = await router.generate(blind, text=PROMPT)
        assert "the-worker-1" not in str(hidden)
        assert "cached" not in str(hidden)
        metadata = tuple(blind.items())
        for call in (
            router.stub.Grant(iter([GrantRequest(request=asked)]), metadata=metadata),
            router.fleet.ExplainRoute(ExplainRouteRequest(request=asked), metadata=metadata),
        ):
            told = await _refused(call)
            assert told == "FORBIDDEN"


async def _refused(call: Any) -> str:
    if isinstance(call, grpc.aio.StreamStreamCall):
        with pytest.raises(grpc.aio.AioRpcError):
            assert await call.read() is not grpc.aio.EOF
        return "FORBIDDEN" if await call.code() is grpc.StatusCode.PERMISSION_DENIED else str(await call.code())
    return (await refusal(call)).reason


async def test_block_names_cannot_be_computed_without_the_fleets_secret(tmp_path: Path) -> None:
    """The attacker knows the prompt, the tenant's name, the hash function, the fingerprint and its own salts."""
    keys, worker = Keys(tmp_path / "keys.json"), FakeWorker("w")
    victim, attacker = bearer(keys.add(tenant="victim")), bearer(keys.add(tenant="attacker", may_salt=True))
    async with router_of(keys, worker) as router:
        await router.generate(victim, text=PROMPT)
        (computed,) = worker.submits
        stored = set(worker.cached)
        real = prompt_hashes(root_hash(worker.fingerprint, salt=computed.cache_salt), computed.prompt_token_ids, 4)
        assert set(real) == stored, "the chain is the real one"
        identity = router.inner.service._access.caller(tuple(victim.items())).identity
        for guess in (b"", b"wrong key", GRANT_KEY, derived_key(b"x" * 32, SALT_PURPOSE)):
            salt = Caller("victim", identity, Tenant(), False, guess).cache_salt()
            forged = prompt_hashes(root_hash(worker.fingerprint, salt=salt), computed.prompt_token_ids, 4)
            assert not stored.intersection(forged)
        for salt in (b"", b"victim", b"tenant\0victim"):
            forged = prompt_hashes(root_hash(worker.fingerprint, salt=salt), computed.prompt_token_ids, 4)
            assert not stored.intersection(forged)
        known = Caller("victim", identity, Tenant(), False, SALT_KEY).cache_salt()
        assert known == computed.cache_salt, "with the secret it can be computed"

        # Nor does a client's own salt lead into another tenant's scope, whatever it says.
        for salt_text in ("victim", "tenant\0victim", computed.cache_salt.hex(), "\0" * 8):
            responses = await router.generate(attacker, text=PROMPT, cache_salt=salt_text)
            assert responses[0].prompt.cached_tokens == 0, salt_text


async def test_a_cache_salt_is_set_only_where_it_is_allowed(tmp_path: Path) -> None:
    keys = Keys(tmp_path / "keys.json")
    plain, salting = bearer(keys.add()), bearer(keys.add(may_salt=True))
    async with router_of(keys, FakeWorker("w"), allows_anonymous=True) as router:
        for headers in (plain, {}):
            refused = await router.refused(headers, text=PROMPT, cache_salt="mine")
            assert (refused.reason, refused.field) == ("FORBIDDEN", "cache_salt")
            response = await router.complete(headers, prompt=PROMPT, cache_salt="mine")
            assert (response.status_code, response.json()["error"]["param"]) == (403, "cache_salt")
        for salt in ("one", "another"):
            for wanted in (False, True):
                responses = await router.generate(salting, text=PROMPT, cache_salt=salt)
                assert bool(responses[0].prompt.cached_tokens) is wanted
                response = await router.complete(salting, prompt=PROMPT, cache_salt=salt)
                assert _of_openai(response.json()["usage"]) > 0, "the same salt over HTTP"
