"""Aliases of models over every protocol: requests, lists, terms of identities, metrics and errors."""

from pathlib import Path
from typing import Any

from tests.router.access.callers import Keys, bearer, router_of
from tests.router.fake_worker import FakeWorker
from tests.router.openai.openai_rig import CHAT, client
from trunkline.v1.inference_pb2 import TokenizeRequest
from trunkline_router.request.prepare import ModelAliases

ALIASES = ModelAliases(["claude-*=tiny", "gpt-4o=tiny", "old=gone", "small=tiny"])
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi"},
    "/v1/chat/completions": {"messages": CHAT},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": CHAT, "max_tokens": 4},
}


async def test_an_alias_is_served_by_its_model_which_answers_under_its_own_name() -> None:
    async with client(FakeWorker("w", model="tiny"), aliases=ALIASES) as asks:
        for path, body in BODIES.items():
            for name in ("gpt-4o", "claude-sonnet-4-5", "tiny"):
                assert (await asks.answer(path, model=name, **body))["model"] == "tiny", path
        streamed = await asks.all_events("/v1/chat/completions", model="gpt-4o", messages=CHAT)
        assert {event["model"] for event in streamed if event != "[DONE]"} == {"tiny"}
        assert (await asks.answer("/tokenize", model="gpt-4o", prompt="hi"))["count"]
        [first, *_] = await asks.router.answer("hi", model="claude-x")
        assert first.prompt.model == "tiny"
        assert (await asks.router.stub.Tokenize(TokenizeRequest(model="gpt-4o", text="hi"))).token_ids
        metrics = (await asks.http.get("/metrics")).text
        assert 'model="tiny"' in metrics
        assert "gpt-4o" not in metrics


async def test_aliases_are_listed_with_their_model_as_root() -> None:
    async with client(FakeWorker("w", model="tiny"), aliases=ALIASES) as asks:
        listed = (await asks.http.get("/v1/models")).json()["data"]
        roots = [(model["id"], model["root"], model["parent"]) for model in listed]
        assert roots == [("tiny", "tiny", None), ("gpt-4o", "tiny", None), ("small", "tiny", None)]
        assert (await asks.http.get("/v1/models/gpt-4o")).json() == listed[1]
        assert (await asks.http.get("/v1/models/claude-x")).json()["root"] == "tiny"
        assert (await asks.http.get("/v1/models/old")).status_code == 404


async def test_a_served_model_precedes_an_alias_of_the_same_name() -> None:
    workers = FakeWorker("w1", model="tiny"), FakeWorker("w2", model="small")
    async with client(*workers, aliases=ALIASES) as asks:
        assert (await asks.complete(model="small"))["model"] == "small"
        listed = (await asks.http.get("/v1/models")).json()["data"]
        assert [(model["id"], model["root"]) for model in listed if model["id"] == "small"] == [("small", "small")]
        await workers[1].die()
        await asks.router.until_workers(True, False)
        error = await asks.refusal("/v1/completions", 503, model="small", prompt="hi")
        assert "small" in error["message"], "no other model serves it while its own workers are away"


async def test_an_alias_of_a_model_that_is_not_served_is_not_found_and_both_are_named() -> None:
    async with client(FakeWorker("w", model="tiny"), aliases=ALIASES) as asks:
        error = await asks.refusal("/v1/completions", 404, model="old", prompt="hi")
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert "'old' is an alias: no model 'gone'; served: tiny" in error["message"]


async def test_an_identity_may_use_the_aliases_of_its_models_alone(tmp_path: Path) -> None:
    keys = Keys(tmp_path / "keys.json")
    mine, other = bearer(keys.add(models=["tiny"])), bearer(keys.add(models=["other", "gpt-4o"]))
    async with router_of(keys, FakeWorker("w", model="tiny"), aliases=ALIASES) as router:
        assert await router.generate(mine, model="gpt-4o", text="hi")
        refused = await router.refused(other, model="gpt-4o", text="hi")
        assert (refused.reason, refused.field) == ("FORBIDDEN", "model")
        assert "tiny" not in refused.message
        listed = [(await router.http.get("/v1/models", headers=headers)).json()["data"] for headers in (mine, other)]
        assert [[model["id"] for model in models] for models in listed] == [["tiny", "gpt-4o", "small"], []]
