"""POST /v1/chat/completions: what a client gets, whole and streamed, and what reaches the worker."""

import asyncio
from functools import partial
from typing import Any

import pytest

from tests.router.cluster import until
from tests.router.fake_worker import FakeWorker
from tests.router.openai.openai_rig import CHAT, client
from tests.router.parameter_examples import as_json, examples, values
from tests.router.tokenizer_files import byte_tokenizer, tokenizer_files
from trunkline.sampling_params import Http
from trunkline.status import RequestRefused, no_worker
from trunkline.v1.generation_pb2 import FinishReason, Lane
from trunkline_router.access.access import Tenant, Tenants
from trunkline_router.edge.http_call import Edge
from trunkline_router.quotas.quota import Quotas
from trunkline_router.request.failover import FailoverLimits
from trunkline_router.workers.link_context import LinkLimits

PATH = "/v1/chat/completions"
STOP = FinishReason.FINISH_REASON_STOP
# A silent worker counts as hung, which would end requests too.
PATIENT = LinkLimits(inter_token_timeout_s=1000)


async def test_an_answer_has_its_choices_and_its_usage() -> None:
    async with client(FakeWorker("w", answer=3)) as asks:
        answer = await asks.chat(n=2, max_tokens=3)
    assert (answer["object"], answer["model"]) == ("chat.completion", "tiny")
    assert answer["id"].startswith("chatcmpl-")
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    for choice in answer["choices"]:
        assert choice["message"] == {"role": "assistant", "content": "xxx", "refusal": None, "annotations": []}
        assert (choice["finish_reason"], choice["logprobs"]) == ("length", None)
    usage = answer["usage"]
    assert usage["completion_tokens"] == 6
    assert usage["total_tokens"] == usage["prompt_tokens"] + 6
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}


async def test_parameters_reach_the_worker_under_the_names_of_openai_and_of_vllm() -> None:
    worker = FakeWorker("w", answer=None)
    same = examples(Http.ALL, Http.OPENAI)
    body: dict[str, Any] = {
        **as_json(same), "max_completion_tokens": 7, "stop": ["a", "b"], "priority": 3,
        "include_stop_str_in_output": True, "skip_special_tokens": False, "logprobs": True, "top_logprobs": 2,
    }  # fmt: skip
    async with client(worker) as asks:
        asked = asyncio.create_task(asks.chat(**body))
        choice = await worker.arrived.get()
        choice.tokens(1, finish=True)
        await asked
    sampling = choice.submit.sampling
    assert values(sampling, same) == same
    assert (sampling.max_tokens, list(sampling.stop), sampling.logprobs) == (7, ["a", "b"], 2)
    assert (sampling.include_stop, sampling.keep_special_tokens) == (True, True)
    assert choice.submit.lane == Lane.LANE_BATCH


@pytest.mark.parametrize(("field", "sent", "value"), [("seed", -1, (1 << 64) - 1), ("top_k", -1, 0)])
async def test_negative_numbers_mean_what_they_mean_with_vllm(field: str, sent: int, value: int) -> None:
    worker = FakeWorker("w", answer=1)
    async with client(worker) as asks:
        await asks.chat(**{field: sent})
    assert getattr(worker.submits[0].sampling, field) == value


async def test_a_stream_opens_each_choice_and_ends_with_usage_and_done() -> None:
    worker = FakeWorker("w", answer=None)
    async with client(worker) as asks:
        events = asks.events(PATH, messages=CHAT, n=2, stream_options={"include_usage": True})
        asked = asyncio.create_task(anext(events))
        choices = sorted([await worker.arrived.get(), await worker.arrived.get()], key=lambda one: one.submit.choice)
        choices[0].tokens(2, text="ab")
        opened = [await asked, await anext(events)]
        first = await anext(events)
        choices[1].tokens(1, text="ü", finish=True, ending=STOP)
        second = await anext(events)
        choices[0].tokens(1, text="", finish=True)
        third, usage, done = [event async for event in events]
    opening = {"role": "assistant", "content": "", "refusal": None}
    assert [event["choices"][0]["delta"] for event in opened] == [opening, opening]
    assert [event["choices"][0]["index"] for event in opened] == [0, 1]
    assert first["choices"] == [{"index": 0, "delta": {"content": "ab"}, "logprobs": None, "finish_reason": None}]
    assert second["choices"][0]["delta"] == {"content": "ü"}
    assert (second["choices"][0]["index"], second["choices"][0]["finish_reason"]) == (1, "stop")
    assert (third["choices"][0]["delta"], third["choices"][0]["finish_reason"]) == ({}, "length")
    events_of_one_answer = [*opened, first, second, third, usage]
    assert len({(event["id"], event["created"], event["model"]) for event in events_of_one_answer}) == 1
    assert all(event["usage"] is None for event in events_of_one_answer[:-1])
    assert (usage["choices"], usage["usage"]["completion_tokens"], done) == ([], 4, "[DONE]")


async def test_continuous_usage_counts_up() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with client(FakeWorker("w", answer=3)) as asks:
        events = await asks.all_events(PATH, messages=CHAT, stream_options=options)
    counts = [event["usage"]["completion_tokens"] for event in events[:-1]]
    assert counts == sorted(counts)
    assert counts[-1] == 3


async def test_log_probabilities_name_tokens_by_text_and_bytes() -> None:
    async with client(FakeWorker("w", answer=4)) as asks:
        answer = await asks.chat(logprobs=True, top_logprobs=2)
        streamed = await asks.all_events(PATH, messages=CHAT, logprobs=True, top_logprobs=2)
    content = answer["choices"][0]["logprobs"]["content"]
    first_letter = byte_tokenizer().id_to_token(3) or ""
    assert [entry["token"] for entry in content] == ["<unk>", "<s>", "</s>", first_letter]
    assert content[3]["bytes"] == list(first_letter.encode())
    assert [top["logprob"] for top in content[0]["top_logprobs"]] == [-0.5, -1.5]
    parts = [event["choices"][0]["logprobs"] for event in streamed[:-1] if event["choices"][0]["logprobs"]]
    assert [entry for part in parts for entry in part["content"]] == content


async def test_no_top_log_probabilities_may_be_asked_for_without_log_probabilities() -> None:
    async with client(FakeWorker("w", answer=1)) as asks:
        answer = await asks.chat(top_logprobs=0)
    assert answer["choices"][0]["logprobs"] is None


async def test_a_conversation_reaches_the_template_as_it_was_sent() -> None:
    worker = FakeWorker("w", answer=None)
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c", "refusal": None, "tool_calls": None, "annotations": []},
    ]
    async with client(worker) as asks:
        prompts = []
        for more in ({}, {"add_generation_prompt": False}, {"continue_final_message": True}):
            asked = asyncio.create_task(asks.answer(PATH, messages=messages, return_token_ids=True, **more))
            choice = await worker.arrived.get()
            choice.tokens(1, finish=True)
            answer = await asked
            assert answer["prompt_token_ids"] == list(choice.submit.prompt_token_ids)
            prompts.append(byte_tokenizer().decode(answer["prompt_token_ids"], skip_special_tokens=False))
    said = "<s>system:be brief</s><s>user:a\nb</s><s>assistant:c"
    assert prompts == [f"{said}</s><s>assistant:", f"{said}</s>", said]


def content(part: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [part]}]}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an image": (content({"type": "image_url", "image_url": {"url": "x"}}), "messages[0].content[0].image_url"),
    "audio": (content({"type": "input_audio", "input_audio": {"data": ""}}), "messages[0].content[0].input_audio"),
    "another kind of part": (content({"type": "smell"}), "messages[0].content[0]"),
    "a role": ({"messages": [{"role": "owl", "content": "hoo"}]}, "messages[0].role"),
    "no messages": ({"messages": []}, "messages"),
    "guided decoding": ({"guided_json": {}}, "guided_json"),
    "structured output": ({"response_format": {"type": "yaml"}}, "response_format.type"),
    "an unknown field": ({"temprature": 1}, "temprature"),
    "a field of a message": ({"messages": [{"role": "user", "content": "a", "mood": "x"}]}, "messages[0].mood"),
    "a number as text": ({"temperature": "1"}, "temperature"),
    "a temperature": ({"temperature": -1}, "temperature"),
    "no model": ({"model": None}, "model"),
    "an empty model": ({"model": ""}, "model"),
    "n": ({"n": 5}, "n"),
    "n of none": ({"n": 0}, "n"),
    "top_logprobs alone": ({"top_logprobs": 1}, "top_logprobs"),
    "two limits": ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
    "usage of no stream": ({"stream_options": {"include_usage": True}}, "stream_options"),
    "a token id": ({"logit_bias": {"x": 1}}, "logit_bias"),
    "a token id beyond the vocabulary": ({"stop_token_ids": [100_000]}, "stop_token_ids"),
    "a salt of the wrong type": ({"cache_salt": 7}, "cache_salt"),
    "storing": ({"store": True}, "store"),
    "beam search of nothing": ({"use_beam_search": 0}, "use_beam_search"),
}  # fmt: skip


async def test_what_is_not_served_is_refused_by_name() -> None:
    async with client(FakeWorker("w")) as asks:
        for name, (body, param) in REFUSED.items():
            error = await asks.refusal(PATH, **{"messages": CHAT, **body})
            assert (error["param"], error["type"]) == (param, "invalid_request_error"), name
            assert param in error["message"], name
            assert "sampling" not in error["message"], name
        await asks.chat()  # the next request is served


async def test_unknown_fields_pass_where_that_is_configured_and_are_named() -> None:
    async with client(FakeWorker("w"), edge=partial(Edge, allows_unknown_fields=True)) as asks:
        answer = await asks.post(PATH, {"messages": CHAT, "model": "tiny", "temprature": 1})
        assert (answer.status_code, answer.headers["x-trunkline-warning"]) == (200, "ignored fields: temprature")
        answer = await asks.post(PATH, {"messages": CHAT, "model": "tiny", "a\r\nb: é\0": 1})
        assert (answer.status_code, answer.headers["x-trunkline-warning"]) == (200, "ignored fields: a??b: ??")
        await asks.refusal(PATH, messages=CHAT, guided_json={"type": "object"})  # a constraint is never ignored


async def test_headers_tell_request_worker_and_cached_tokens() -> None:
    async with client(FakeWorker("w")) as asks:
        answer = await asks.post(PATH, {"messages": CHAT, "model": "tiny"}, x_request_id="mine-1")
        assert answer.headers["x-request-id"] == "mine-1"
        assert (answer.headers["x-trunkline-worker"], answer.headers["x-trunkline-cached-tokens"]) == ("w", "0")
        assert answer.json()["id"] == "chatcmpl-mine-1"
        assert (await asks.post(PATH, {"messages": CHAT}, x_request_id="with space")).status_code == 400


async def test_quotas_hold_over_http_and_are_told() -> None:
    tenants = Tenants({"acme": Tenant(quotas=Quotas(requests_per_minute=2))})
    async with client(FakeWorker("w"), tenants=tenants) as asks:
        body = {"messages": CHAT, "model": "tiny"}
        left = []
        for _ in range(2):
            answer = await asks.post(PATH, body, x_trunkline_tenant="acme")
            assert answer.status_code == 200
            left.append(answer.headers["x-ratelimit-remaining-requests"])
        refused = await asks.post(PATH, body, x_trunkline_tenant="acme")
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "quota_exceeded")
        assert 1 <= int(refused.headers["retry-after"]) <= 61
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        assert left == ["1", "0"]
        assert refused.headers["x-ratelimit-limit-requests"] == "2"
        assert (await asks.post(PATH, body, x_trunkline_tenant="globex")).status_code == 200


def has_aborted(worker: FakeWorker, count: int) -> bool:
    return len(worker.aborted) == count


async def test_a_client_that_leaves_ends_its_request_at_the_worker() -> None:
    worker = FakeWorker("w", answer=None)
    async with client(worker, link_limits=PATIENT) as asks:
        for count, stream in enumerate((False, True), start=1):
            body = {"messages": CHAT, "model": "tiny", "stream": stream}
            asked = asyncio.create_task(asks.post(PATH, body))
            choice = await worker.arrived.get()
            if stream:
                choice.tokens(1)
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
            await until(partial(has_aborted, worker, count))


async def test_an_error_after_the_first_event_is_an_event_and_nothing_follows() -> None:
    worker = FakeWorker("w", answer=None)
    async with client(worker, failover=FailoverLimits(0)) as asks:
        events = asks.events(PATH, messages=CHAT)
        asked = asyncio.create_task(anext(events))
        choice = await worker.arrived.get()
        choice.tokens(1)
        await asked
        await worker.die()
        rest = [event async for event in events]
    assert rest[-1]["error"].keys() == {"message", "type", "param", "code"}
    assert rest[-1]["error"]["code"] == "no_worker"
    assert "[DONE]" not in rest


@pytest.mark.parametrize(("path", "prompt"), [(PATH, {"messages": CHAT}), ("/v1/completions", {"prompt": "hi"})])
async def test_a_token_whose_text_is_held_back_is_an_event(path: str, prompt: dict[str, Any]) -> None:
    # As in vLLM. A byte of a character has no text yet, and a client that measures its first token must not wait.
    worker = FakeWorker("w", answer=None)
    async with client(worker) as asks:
        events = asks.events(path, **prompt)
        asked = asyncio.create_task(anext(events))
        choice = await worker.arrived.get()
        choice.tokens(1, text="")
        opening = [await asked] if path == PATH else []
        held = await anext(events) if opening else await asked
        choice.tokens(1, text="é", finish=True)
        rest = [event async for event in events]
    texts = [
        event["choices"][0]["text"] if path != PATH else event["choices"][0]["delta"].get("content")
        for event in [held, *rest[:-1]]
    ]
    assert texts == ["", "é"]


async def test_an_answer_that_its_worker_cancels_is_an_error() -> None:
    worker = FakeWorker("w", answer=None)
    async with client(worker) as asks:
        asked = asyncio.create_task(asks.refusal(PATH, 503, messages=CHAT))
        choice = await worker.arrived.get()
        choice.tokens(1, finish=True, ending=FinishReason.FINISH_REASON_ABORT)
        assert (await asked)["code"] == "no_worker"


async def test_a_request_that_makes_room_after_a_comment_ends_with_an_event() -> None:
    worker = FakeWorker("w", answer=None)
    async with client(worker, link_limits=PATIENT, edge=partial(Edge, keep_alive_s=0.02)) as asks:
        body = {
            "model": "tiny",
            "stream": True,
            "messages": [{"role": "user", "content": "x" * 3000}],
            "user": "y" * 20_000,
        }
        async with asks.http.stream("POST", PATH, json=body) as answer:
            lines = answer.aiter_lines()
            assert await anext(lines) == ": keep-alive"
            [[[held]]] = [of_host.values() for of_host in asks.router.gate.held._loose.values()]
            held.give_up(RequestRefused(8, "OVERLOADED", "make room", retry_delay_ms=1000))
            data = [line async for line in lines if line.startswith("data: ")]
    assert len(data) == 1
    assert '"code":"overloaded"' in data[0]


async def test_an_error_before_the_first_event_has_its_status() -> None:
    worker = FakeWorker("w", answer=None)
    async with client(worker) as asks:
        await worker.die()
        await until(lambda: asks.router.links[0].worker is None)
        answer = await asks.post(PATH, {"messages": CHAT, "model": "tiny", "stream": True})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_worker")
        assert int(answer.headers["retry-after"]) >= 1
    assert no_worker("").reason == "NO_WORKER"


async def test_a_stream_continues_on_another_worker() -> None:
    first, second = FakeWorker("a", answer=None), FakeWorker("b", answer=None)
    async with client(first, second) as asks:
        events = asks.events(PATH, messages=CHAT)
        asked = asyncio.create_task(anext(events))
        await until(lambda: not (first.arrived.empty() and second.arrived.empty()))
        lost, other = (first, second) if not first.arrived.empty() else (second, first)
        choice = lost.arrived.get_nowait()
        choice.tokens(2, text="ab")
        await asked
        await lost.die()
        resumed = await other.arrived.get()
        assert len(resumed.submit.resume.output_token_ids) == 2
        resumed.sent, resumed.text_bytes = 2, 2
        resumed.tokens(1, text="c", finish=True)
        rest = [event async for event in events]
    text = "".join(event["choices"][0]["delta"].get("content") or "" for event in rest[:-1])
    assert (text, rest[-1]) == ("abc", "[DONE]")


async def test_without_a_chat_template_the_refusal_names_no_field_of_grpc() -> None:
    async with client(FakeWorker("w", files=tokenizer_files(chat_template=None))) as asks:
        error = await asks.refusal(PATH, messages=CHAT)
    assert error["param"] == "messages"
    assert error["message"] == "messages: this model has no chat template: send a text or token ids instead"


async def test_a_silent_stream_gets_comments() -> None:
    worker = FakeWorker("w", answer=None)
    async with client(worker, link_limits=PATIENT, edge=partial(Edge, keep_alive_s=0.02)) as asks:
        body = {"messages": CHAT, "model": "tiny", "stream": True}
        async with asks.http.stream("POST", PATH, json=body) as answer:
            lines = answer.aiter_lines()
            assert await anext(lines) == ": keep-alive"
            (await worker.arrived.get()).tokens(1, finish=True)
            rest = [line async for line in lines]
    assert rest[-2] == "data: [DONE]"
