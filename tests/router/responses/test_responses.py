"""POST /v1/responses without a stream."""

import asyncio
import time
from functools import partial
from typing import Any

import pytest

from tests.router.cluster import until
from tests.router.fake_worker import FakeWorker
from tests.router.parameter_examples import as_json, examples, values
from tests.router.responses.responses_client import STOP, Json, Keys, client, prompt_of, text_of
from trunkline.sampling_params import Http
from trunkline.v1.generation_pb2 import Lane, SamplingParams
from trunkline_router.access.access import Access
from trunkline_router.edge.http_call import Edge

PROMPT = "<s>user:hi</s><s>assistant:"  # that the input "hi" makes


async def test_a_response_has_every_field_of_openais() -> None:
    worker = FakeWorker("w", answer=None)
    async with client(worker) as responses:
        before = int(time.time())
        asked = asyncio.create_task(responses.post(headers={"x-request-id": "r-1"}))
        (await worker.arrived.get()).tokens(3, finish=True, ending=STOP)
        answer = await asked
    response = answer.json()
    assert response["id"].startswith("resp_")
    item = response["output"][0]
    assert item["id"].startswith("msg_")
    assert before <= response["created_at"] <= response["completed_at"] <= time.time()
    assert response == {
        "id": response["id"],
        "object": "response",
        "created_at": response["created_at"],
        "completed_at": response["completed_at"],
        "status": "completed",
        "incomplete_details": None,
        "error": None,
        "model": "tiny",
        "instructions": None,
        "previous_response_id": None,
        "output": [
            {
                "id": item["id"],
                "type": "message",
                "status": "completed",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "xxx", "annotations": [], "logprobs": []}],
            }
        ],
        "usage": {
            "input_tokens": len(worker.submits[0].prompt_token_ids),
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": 3,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": len(worker.submits[0].prompt_token_ids) + 3,
        },
        "temperature": 1.0,
        "top_p": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "top_logprobs": 0,
        "max_output_tokens": None,
        "text": {"format": {"type": "text"}},
        "reasoning": {"effort": None, "summary": None},
        "tools": [],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "max_tool_calls": None,
        "truncation": "disabled",
        "store": False,
        "background": False,
        "service_tier": "default",
        "metadata": {},
        "safety_identifier": None,
        "prompt_cache_key": None,
        "user": None,
    }
    assert answer.headers["x-request-id"] == "r-1"
    assert prompt_of(worker.submits[0]) == PROMPT


async def test_a_response_that_reaches_its_limit_is_incomplete() -> None:
    worker = FakeWorker("w")
    async with client(worker) as responses:
        response = await responses.response(max_output_tokens=3)
    assert (response["status"], response["completed_at"]) == ("incomplete", None)
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert (response["output"][0]["status"], text_of(response)) == ("incomplete", "xxx")
    assert response["max_output_tokens"] == worker.submits[0].sampling.max_tokens == 3


async def test_an_answer_without_tokens_has_an_empty_text() -> None:
    worker = FakeWorker("w", answer=None)
    async with client(worker) as responses:
        asked = asyncio.create_task(responses.response())
        (await worker.arrived.get()).tokens(1, text="", finish=True, ending=STOP)
        assert text_of(await asked) == ""


def message(role: str, content: Any, **more: Any) -> Json:
    return {"role": role, "content": content, **more}


INPUTS: dict[str, tuple[Json, str]] = {
    "text": ({"input": "ho"}, "<s>user:ho</s>"),
    "messages without a type": ({"input": [message("user", "ho")]}, "<s>user:ho</s>"),
    "developer is system": (
        {"input": [message("developer", "be kind"), message("user", "ho", type="message")]},
        "<s>system:be kind</s><s>user:ho</s>",
    ),
    "instructions come first": (
        {"instructions": "be brief", "input": [message("system", "be kind"), message("user", "ho")]},
        "<s>system:be brief</s><s>system:be kind</s><s>user:ho</s>",
    ),
    "parts": (
        {"input": [message("user", [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}])]},
        "<s>user:a\nb</s>",
    ),
    "messages as they were answered": (
        {
            "input": [
                message("user", "hi"),
                message(
                    "assistant",
                    [{"type": "output_text", "text": "x", "annotations": [], "logprobs": []}],
                    type="message",
                    id="msg_1",
                    status="completed",
                    phase="final_answer",
                ),
                message("assistant", [{"type": "refusal", "refusal": "no"}], type="message", phase="commentary"),
                message("user", "ho"),
            ]
        },
        "<s>user:hi</s><s>assistant:x\nno</s><s>user:ho</s>",
    ),
}


@pytest.mark.parametrize("name", INPUTS)
async def test_the_input_becomes_the_conversation(name: str) -> None:
    body, prompt = INPUTS[name]
    worker = FakeWorker("w")
    async with client(worker) as responses:
        await responses.response(**body)
    assert prompt_of(worker.submits[0]) == prompt + "<s>assistant:"


async def test_the_object_has_the_numbers_that_count() -> None:
    defaults = SamplingParams(temperature=0.7, top_p=0.9, top_k=5)
    worker = FakeWorker("w", default_sampling=defaults)
    async with client(worker) as responses:
        theirs = await responses.response()
        mine = await responses.response(temperature=0, top_p=0.3, presence_penalty=0.1, frequency_penalty=-1, seed=3)
    names = ("temperature", "top_p", "presence_penalty", "frequency_penalty")
    assert [theirs[name] for name in names] == [0.7, 0.9, 0, 0]
    assert [mine[name] for name in names] == [0, 0.3, 0.1, -1]
    for response, submit in zip((theirs, mine), worker.submits, strict=True):
        for name in names:
            assert response[name] == pytest.approx(getattr(submit.sampling, name)), "as the worker samples"
    assert (worker.submits[1].sampling.seed, worker.submits[1].sampling.top_k) == (3, 5)


async def test_parameters_and_vllms_fields_reach_the_worker() -> None:
    same = examples(Http.ALL, Http.OPENAI)
    worker = FakeWorker("w")
    async with client(worker) as responses:
        await responses.response(**as_json(same), stop=["END"], priority=1)
    sampling = worker.submits[0].sampling
    assert values(sampling, same) == same
    assert (list(sampling.stop), worker.submits[0].lane) == (["END"], Lane.LANE_BATCH)


async def test_what_changes_no_output_is_ignored_or_repeated() -> None:
    repeated: Json = {
        "metadata": {"ticket": "7"},
        "user": "u",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "instructions": "be kind",
        "tool_choice": "none",
        "parallel_tool_calls": False,
    }
    ignored: Json = {
        "tools": [],
        "include": ["reasoning.encrypted_content"],
        "reasoning": {},
        "text": {"format": {"type": "text"}, "verbosity": "low"},
        "truncation": "disabled",
        "background": False,
        "conversation": None,
        "prompt": None,
        "service_tier": "auto",
        "prompt_cache_retention": "24h",
        "max_tool_calls": None,
        "store": False,
        "stream": False,
        "temperature": None,
    }
    async with client(FakeWorker("w")) as responses:
        answer = await responses.post(**repeated, **ignored)
        assert answer.status_code == 200, answer.text
        assert "x-trunkline-warning" not in answer.headers
        response = answer.json()
        assert {name: response[name] for name in repeated} == repeated
        reasoning = {"effort": "none", "summary": "auto"}
        assert (await responses.response(reasoning=reasoning))["reasoning"] == reasoning


async def test_a_router_may_let_unknown_fields_pass_and_names_them() -> None:
    async with client(FakeWorker("w"), edge=partial(Edge, allows_unknown_fields=True)) as responses:
        answer = await responses.post(colour="red", input=[message("user", "hi", mood="good")])
        assert answer.status_code == 200
        assert answer.headers["x-trunkline-warning"] == "ignored fields: colour, input[0].mood"


async def test_cached_tokens_are_told_only_to_callers_that_may_see_them() -> None:
    async with client(FakeWorker("w"), access=Access(identify=Keys().identify)) as responses:

        async def cached(key: str) -> int:
            usage = (await responses.response(key=key, instructions="a long text"))["usage"]
            return int(usage["input_tokens_details"]["cached_tokens"])

        assert await cached("acme") == 0
        assert await cached("acme") > 0
        assert await cached("acme:blind") == 0


async def test_a_client_that_goes_ends_its_request_at_the_worker() -> None:
    worker = FakeWorker("w", answer=None)
    async with client(worker) as responses:
        asked = asyncio.create_task(responses.response())
        await worker.arrived.get()
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        await until(lambda: len(worker.aborted) == 1)
