"""POST /v1/messages without a stream."""

import asyncio
from functools import partial

import pytest

from tests.router.anthropic.messages_client import HI, Json, arrived, client, prompt_of
from tests.router.cluster import until
from tests.router.fake_worker import FakeWorker
from tests.router.parameter_examples import as_json, examples, values
from trunkline.sampling_params import Http
from trunkline.status import CODE_UNAUTHENTICATED, UNAUTHENTICATED, RequestRefused
from trunkline.v1.generation_pb2 import FinishReason, Lane
from trunkline_router.access.access import Access
from trunkline_router.access.identity.identity import Identity, Role
from trunkline_router.edge.http_call import Edge

STOP = FinishReason.FINISH_REASON_STOP
PROMPT = "<s>user:hi</s><s>assistant:"  # that HI makes


def part(text: str) -> Json:
    return {"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}


async def test_a_message_has_every_field_of_anthropics() -> None:
    worker = FakeWorker("w")
    async with client(worker) as messages:
        response = await messages.post(model="tiny", max_tokens=3, headers={"x-request-id": "r-1"})
    assert response.status_code == 200
    assert response.json() == {
        "id": "msg_r-1",
        "type": "message",
        "role": "assistant",
        "model": "tiny",
        "content": [{"type": "text", "text": "xxx", "citations": []}],
        "stop_reason": "max_tokens",
        "stop_sequence": None,
        "stop_details": None,
        "container": None,
        "usage": {
            "input_tokens": len(worker.submits[0].prompt_token_ids),
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 3,
            "output_tokens_details": None,
            "server_tool_use": None,
            "cache_creation": None,
            "inference_geo": None,
            "service_tier": "standard",
        },
    }
    assert (response.headers["request-id"], response.headers["x-trunkline-worker"]) == ("r-1", "w")
    assert prompt_of(worker.submits[0]) == PROMPT


async def test_an_answer_ends_as_the_model_or_a_stop_sequence_or_a_limit_ends_it() -> None:
    worker = FakeWorker("w", answer=None, context_length=64)
    async with client(worker) as messages:

        async def ended(max_tokens: int, count: int, text: str, **end: object) -> tuple[str, str | None, str]:
            asked = asyncio.create_task(messages.message(max_tokens=max_tokens, stop_sequences=["END", "\n\n"]))
            choice = await arrived(worker)
            assert list(choice.submit.sampling.stop) == ["END", "\n\n"]
            choice.tokens(count, text=text, finish=True, **end)  # type: ignore[arg-type]
            message = await asked
            assert message["usage"]["output_tokens"] == count
            return message["stop_reason"], message["stop_sequence"], message["content"][0]["text"]

        room = 64 - len(PROMPT.replace("<s>", "_").replace("</s>", "_"))
        assert await ended(8, 2, "ab", ending=STOP) == ("end_turn", None, "ab")
        assert await ended(8, 2, "ab", ending=STOP, stop_string="END") == ("stop_sequence", "END", "ab")
        assert await ended(8, 8, "abcdefgh") == ("max_tokens", None, "abcdefgh")
        assert await ended(room, room, "ab") == ("max_tokens", None, "ab")
        assert await ended(32_000, room, "ab") == ("model_context_window_exceeded", None, "ab")
        assert [submit.sampling.max_tokens for submit in worker.submits] == [8, 8, 8, room, room]
        assert await ended(8, 1, "", ending=STOP) == ("end_turn", None, ""), "an empty answer has an empty block"


async def test_a_prompt_that_leaves_no_room_is_refused() -> None:
    async with client(FakeWorker("w", context_length=64)) as messages:
        error = await messages.refusal(messages=[{"role": "user", "content": "x" * 64}])
        assert error["type"] == "invalid_request_error"
        assert "64 tokens" in error["message"]


@pytest.mark.parametrize(
    ("body", "prompt"),
    [
        ({"system": "Be kind."}, "<s>system:Be kind.</s>" + PROMPT),
        ({"system": [part("Be kind."), part("Be brief.")]}, "<s>system:Be kind.\nBe brief.</s>" + PROMPT),
        ({"system": ""}, PROMPT),
        ({"messages": [{"role": "user", "content": [part("hi")]}]}, PROMPT),
        ({"messages": [{"role": "user", "content": [part("a"), part("b")]}]}, "<s>user:a\nb</s><s>assistant:"),
        (
            {"messages": [HI, {"role": "assistant", "content": "oh"}, HI]},
            "<s>user:hi</s><s>assistant:oh</s>" + PROMPT,
        ),
        ({"messages": [{"role": "user", "content": "a"}, HI]}, "<s>user:a\nhi</s><s>assistant:"),
        ({"messages": [{"role": "system", "content": "a"}, HI], "system": "b"}, "<s>system:b\na</s>" + PROMPT),
        ({"messages": [HI, {"role": "assistant", "content": "It is"}]}, "<s>user:hi</s><s>assistant:It is"),
        ({"messages": [HI, {"role": "assistant", "content": [part("It")]}]}, "<s>user:hi</s><s>assistant:It"),
        ({"messages": [HI, {"role": "assistant", "content": ""}]}, PROMPT),
    ],
    ids=str,
)
async def test_the_conversation_is_rendered_and_a_begun_answer_continued(body: Json, prompt: str) -> None:
    worker = FakeWorker("w")
    async with client(worker) as messages:
        await messages.message(**body)
    assert prompt_of(worker.submits[0]) == prompt


async def test_sampling_is_what_the_request_says() -> None:
    worker, same = FakeWorker("w"), examples(Http.ALL)
    async with client(worker) as messages:
        await messages.message(**as_json(same), priority=1)
        await messages.message(temperature=None, top_p=None, top_k=None, stop_sequences=None, stream=False)
    sampling = worker.submits[0].sampling
    assert values(sampling, same) == same
    assert worker.submits[0].lane == Lane.LANE_BATCH
    assert not worker.submits[1].sampling.HasField("temperature")


async def test_what_changes_no_output_is_ignored() -> None:
    async with client(FakeWorker("w")) as messages:
        response = await messages.post(
            metadata={"user_id": "u"},
            service_tier="auto",
            cache_control={"type": "ephemeral"},
            tools=[],
            tool_choice={"type": "auto"},
            thinking={"type": "disabled"},
            container=None,
            mcp_servers=[],
            output_config=None,
            headers={"anthropic-version": "2026-10-21", "anthropic-beta": "x", "x-api-key": "any"},
        )
        assert response.status_code == 200, response.text
        assert "x-trunkline-warning" not in response.headers
        assert (await messages.message(thinking={"type": "adaptive"}))["type"] == "message"


class Keys:
    """Knows two keys."""

    def identify(self, credential: str, host: str = "") -> Identity:
        if credential not in ("sees", "blind"):
            raise RequestRefused(CODE_UNAUTHENTICATED, UNAUTHENTICATED, "unknown credentials")
        return Identity(credential, "acme", frozenset({Role.USER}), sees_cache=credential == "sees")


async def test_cached_tokens_are_no_input_tokens_and_told_only_to_those_who_may_see_them() -> None:
    async with client(FakeWorker("w"), access=Access(identify=Keys().identify)) as messages:

        async def usage(key: str) -> tuple[int, int]:
            response = await messages.post(headers={"x-api-key": key}, system="a long prompt that is cached")
            assert response.status_code == 200, response.text
            used = response.json()["usage"]
            assert used["cache_creation_input_tokens"] == 0
            return used["input_tokens"], used["cache_read_input_tokens"]

        whole, cached = await usage("sees")
        assert cached == 0
        fresh, cached = await usage("sees")
        assert cached > 0
        assert fresh + cached == whole
        assert await usage("blind") == (whole, 0)


async def test_a_client_that_goes_ends_its_request_at_the_worker() -> None:
    worker = FakeWorker("w", answer=None)
    async with client(worker) as messages:
        asked = asyncio.create_task(messages.message())
        await arrived(worker)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        await until(lambda: len(worker.aborted) == 1)


async def test_a_router_may_let_unknown_fields_pass_and_names_them() -> None:
    async with client(FakeWorker("w"), edge=partial(Edge, allows_unknown_fields=True)) as messages:
        response = await messages.post(colour="red", messages=[{**HI, "mood": "good"}])
        assert response.status_code == 200
        assert response.headers["x-trunkline-warning"] == "ignored fields: colour, messages[0].mood"


async def test_fields_that_change_no_answer_are_accepted() -> None:
    """What Claude Code sends in each request."""
    edits = [{"type": "clear_thinking_20251015", "keep": "all"}]
    async with client(FakeWorker("w")) as messages:
        response = await messages.post(
            headers={"anthropic-beta": "context-management-2025-06-27,effort-2025-11-24", "anthropic-version": "x"},
            path="/v1/messages?beta=true",
            context_management={"edits": edits},
            metadata={"user_id": "x"},
        )
        assert response.status_code == 200, response.text
        assert "x-trunkline-warning" not in response.headers
