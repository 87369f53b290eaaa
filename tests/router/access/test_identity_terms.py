"""What an identity is limited to holds over gRPC and HTTP alike: models, the lane, and requests per minute."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.router.access.callers import Headers, Keys, Router, bearer, router_of
from tests.router.fake_worker import FakeWorker
from tests.router.identity import issuer
from trunkline.v1.generation_pb2 import Lane
from trunkline.v1.inference_pb2 import DetokenizeRequest, ListModelsRequest, TokenizeRequest
from trunkline.v1.worker_pb2 import Capability

MINE, OTHER = "mine", "other"
CHAT = [{"role": "user", "content": "hi"}]
WITH_MODEL: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi"},
    "/v1/chat/completions": {"messages": CHAT},
    "/v1/messages": {"messages": CHAT, "max_tokens": 4},
    "/v1/messages/count_tokens": {"messages": CHAT},
    "/v1/responses": {"input": "hi"},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [40, 41]},
    "/v1/embeddings": {"input": "hi"},
    "/pooling": {"input": "hi"},
    "/classify": {"input": "hi"},
    "/v1/rerank": {"query": "hi", "documents": ["ho"]},
    "/rerank": {"query": "hi", "documents": ["ho"]},
    "/v2/rerank": {"query": "hi", "documents": ["ho"]},
    "/v1/score": {"text_1": "hi", "text_2": "ho"},
    "/score": {"text_1": "hi", "text_2": "ho"},
}


def both(keys: Keys, **terms: Any) -> list[Headers]:
    """A key and a token with the same terms, which a token's claims may say."""
    return [bearer(keys.add(**terms)), bearer(issuer.token(issuer.claims(**terms)))]


def metadata_of(headers: Headers) -> tuple[tuple[str, str], ...]:
    return tuple(headers.items())


async def test_only_the_models_of_an_identity_can_be_used_or_seen(tmp_path: Path) -> None:
    keys = Keys(tmp_path / "keys.json")
    identities = both(keys, tenant="limited", models=[MINE])
    pools = [Capability.CAPABILITY_VECTORS, Capability.CAPABILITY_SCORES]
    mine = FakeWorker("w1", model=MINE, capabilities=pools)
    async with router_of(keys, mine, other := FakeWorker("w2", model=OTHER)) as router:
        for headers in identities:
            await assert_limited_over_grpc(router, headers)
            await assert_limited_over_http(router, headers)
        assert not other.submits


async def assert_limited_over_grpc(router: Router, headers: Headers) -> None:
    metadata, stub = metadata_of(headers), router.stub
    listed = await stub.ListModels(ListModelsRequest(), metadata=metadata)
    assert [model.name for model in listed.models] == [MINE]
    assert await router.generate(headers, model=MINE, text="hi")
    assert await router.generate(headers, text="hi"), "an empty name is the only model that the identity may use"
    for name in (OTHER, "no such model"):
        refused = await router.refused(headers, model=name, text="hi")
        assert (refused.reason, refused.field) == ("FORBIDDEN", "model"), "whether it is served is not told"
        for call in (
            stub.Tokenize(TokenizeRequest(model=name, text="hi"), metadata=metadata),
            stub.Detokenize(DetokenizeRequest(model=name, token_ids=[40]), metadata=metadata),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED


async def assert_limited_over_http(router: Router, headers: Headers) -> None:
    http = router.http
    listed = (await http.get("/v1/models", headers=headers)).json()
    assert [model["id"] for model in listed["data"]] == [MINE]
    assert (await http.get(f"/v1/models/{MINE}", headers=headers)).status_code == 200
    unseen = await http.get(f"/v1/models/{OTHER}", headers=headers)
    unknown = await http.get("/v1/models/xxxxx", headers=headers)
    assert unseen.status_code == unknown.status_code == 404
    assert unseen.text.replace(OTHER, "xxxxx") == unknown.text
    for path, body in WITH_MODEL.items():
        answer = await http.post(path, json={"model": MINE, **body}, headers=headers)
        assert answer.status_code == 200, (path, answer.text)
        for name in (OTHER, "no such model"):
            refused = await http.post(path, json={"model": name, **body}, headers=headers)
            assert refused.status_code == 403, (path, refused.text)
            assert refused.json()["error"]["type"] == "permission_error", path


async def test_messages_name_no_model_that_the_identity_may_not_use(tmp_path: Path) -> None:
    keys = Keys(tmp_path / "keys.json")
    both_models, none = bearer(keys.add(models=[MINE, "third", "gone"])), bearer(keys.add(models=["gone"]))
    workers = [FakeWorker(f"w-{name}", model=name) for name in (MINE, OTHER, "third")]
    async with router_of(keys, *workers) as router:
        refused = await router.refused(both_models, text="hi")
        assert refused.reason == "MODEL_NOT_FOUND"
        assert MINE in refused.message
        assert OTHER not in refused.message
        for asked in ({"model": "gone"}, {}):
            refused = await router.refused(none, text="hi", **asked)
            assert MINE not in refused.message
            assert OTHER not in refused.message


async def test_an_identitys_lane_caps_its_requests(tmp_path: Path) -> None:
    keys, worker = Keys(tmp_path / "keys.json"), FakeWorker("w")
    identities = {
        **{"batch": both(keys, tenant="slow", lane="batch"), "standard": both(keys, tenant="plain")},
        "interactive": both(keys, tenant="fast", lane="interactive"),
    }
    async with router_of(keys, worker) as router:
        for lane, all_headers in identities.items():
            wanted = Lane.Value(f"LANE_{lane.upper()}")
            for headers in all_headers:
                responses = await router.generate(headers, text="hi", lane=Lane.LANE_INTERACTIVE)
                assert responses[0].prompt.lane == wanted
                for path in ("/v1/completions", "/v1/chat/completions"):
                    body = {"model": "tiny", "priority": -1, **WITH_MODEL[path]}
                    assert (await router.http.post(path, json=body, headers=headers)).status_code == 200
                assert [submit.lane for submit in worker.submits[-3:]] == [wanted] * 3, lane
                lower = await router.generate(headers, text="hi", lane=Lane.LANE_BATCH)
                assert lower[0].prompt.lane == Lane.LANE_BATCH


@pytest.mark.parametrize("is_grpc_first", [False, True])
async def test_an_identitys_requests_per_minute_count_over_both_protocols(tmp_path: Path, is_grpc_first: bool) -> None:
    keys = Keys(tmp_path / "keys.json")
    identities = both(keys, tenant="a", quotas={"requests_per_minute": 2})
    identities[1] = bearer(issuer.token(issuer.claims(tenant="b", quotas={"requests_per_minute": 2})))
    free = bearer(keys.add(tenant="free"))
    async with router_of(keys, FakeWorker("w")) as router:
        for headers in identities:
            for over_grpc in (is_grpc_first, not is_grpc_first):
                if over_grpc:
                    await router.generate(headers, text="hi")
                else:
                    allowed = await router.complete(headers, prompt="hi")
                    assert allowed.status_code == 200
                    assert allowed.headers["x-ratelimit-limit-requests"] == "2"
                    left = int(allowed.headers["x-ratelimit-remaining-requests"])
                    assert left == (0 if is_grpc_first else 1)
            refused = await router.refused(headers, text="hi")
            assert refused.reason == "QUOTA_EXCEEDED"
            assert refused.retry_s is not None
            assert 0 < refused.retry_s < 90  # a sliding window of a minute
            for path, body in WITH_MODEL.items():
                answer = await router.http.post(path, json={"model": "tiny", **body}, headers=headers)
                assert answer.status_code == 429, path
                assert 1 <= int(answer.headers["retry-after"]) < 90, path
                named = (
                    "anthropic-ratelimit-requests-{}" if path.startswith("/v1/messages") else "x-ratelimit-{}-requests"
                )
                assert answer.headers[named.format("remaining")] == "0", path
                assert named.format("reset") in answer.headers, path
        assert (await router.complete(free, prompt="hi")).status_code == 200
        assert await router.generate(free, text="hi")


async def test_a_revoked_key_counts_as_revoked_at_the_next_call(tmp_path: Path) -> None:
    keys = Keys(tmp_path / "keys.json")
    headers = bearer(keys.add())
    async with router_of(keys, FakeWorker("w")) as router:
        assert await router.generate(headers, text="hi")
        assert (await router.complete(headers, prompt="hi")).status_code == 200
        keys.records[0]["revoked"] = keys.records[0]["created"]
        await router.read_keys(keys)
        assert (await router.refused(headers, text="hi")).reason == "UNAUTHENTICATED"
        assert (await router.complete(headers, prompt="hi")).status_code == 401


async def test_a_caller_is_identified_once_for_each_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = Keys(tmp_path / "keys.json")
    headers = bearer(keys.add(roles=["user", "operator"]))
    async with router_of(keys, FakeWorker("w")) as router:
        counted: list[str] = []
        identify = router.authenticator.identify

        def counting(credential: str, host: str = "") -> Any:
            counted.append(host)
            return identify(credential, host)

        monkeypatch.setattr(router.inner.gate.access, "_identify", counting)
        await router.generate(headers, text="hi")
        await router.stub.Tokenize(TokenizeRequest(text="hi"), metadata=metadata_of(headers))
        await router.complete(headers, prompt="hi")
        assert counted == ["ipv4:127.0.0.1"] * 3
        await asyncio.gather(*(router.generate(headers, text="hi") for _ in range(5)))
        assert len(counted) == 8
