"""POST /v1/responses with a stream: its events, in order."""

import asyncio
from functools import partial

import pytest

from tests.router.cluster import until
from tests.router.fake_worker import FakeWorker
from tests.router.responses.responses_client import STOP, Json, client, error_of, new_store, text_of
from trunkline.status import CODE_INTERNAL, INTERNAL, QUARANTINED, RequestRefused, code_of
from trunkline_router.edge.http_call import Edge

BEGIN = (
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
)
DELTA = "response.output_text.delta"
END = ("response.output_text.done", "response.content_part.done", "response.output_item.done")


async def test_the_events_come_in_order_as_the_tokens_do() -> None:
    worker = FakeWorker("w", answer=None)
    async with client(worker) as responses, responses.stream(worker) as (choice, events):
        choice.tokens(1, text="é\n")
        created = await anext(events)
        response = created.pop("response")
        assert created == {"type": "response.created", "sequence_number": 0}
        assert (response["status"], response["output"], response["usage"]) == ("in_progress", [], None)
        assert (response["completed_at"], response["model"]) == (None, "tiny")
        assert await anext(events) == {"type": "response.in_progress", "sequence_number": 1, "response": response}
        added = await anext(events)
        item = added.pop("item")
        assert added == {"type": "response.output_item.added", "sequence_number": 2, "output_index": 0}
        name = item["id"]
        assert item == {"id": name, "type": "message", "status": "in_progress", "role": "assistant", "content": []}
        place = {"item_id": name, "output_index": 0, "content_index": 0}
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        assert await anext(events) == {
            "type": "response.content_part.added", "sequence_number": 3, **place, "part": part,
        }  # fmt: skip
        delta = {"type": DELTA, **place, "logprobs": []}
        assert await anext(events) == {**delta, "sequence_number": 4, "delta": "é\n"}
        choice.tokens(1, text="")  # half a character: nothing to tell
        choice.tokens(1, text='"b"')
        assert await anext(events) == {**delta, "sequence_number": 5, "delta": '"b"'}
        choice.tokens(1, text="c", finish=True, ending=STOP)
        assert await anext(events) == {**delta, "sequence_number": 6, "delta": "c"}
        part = {**part, "text": 'é\n"b"c'}
        item = {**item, "status": "completed", "content": [part]}
        rest = [event async for event in events]
        completed = rest[-1]["response"]["completed_at"]
        prompt_tokens = len(choice.submit.prompt_token_ids)
        usage = {
            "input_tokens": prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": 4,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt_tokens + 4,
        }
        whole = {**response, "status": "completed", "completed_at": completed, "output": [item], "usage": usage}
        assert completed >= response["created_at"]
        assert rest == [
            {"type": END[0], "sequence_number": 7, **place, "text": part["text"], "logprobs": []},
            {"type": END[1], "sequence_number": 8, **place, "part": part},
            {"type": END[2], "sequence_number": 9, "output_index": 0, "item": item},
            {"type": "response.completed", "sequence_number": 10, "response": whole},
        ]


@pytest.mark.parametrize(("answer", "deltas"), [(5, 1), (0, 0)])
async def test_a_stream_tells_what_the_whole_response_does(answer: int, deltas: int) -> None:
    async with client(FakeWorker("w", answer=answer)) as responses:
        whole = await responses.response(max_output_tokens=5)
        stream = await responses.streamed(max_output_tokens=5, stream_options={"include_obfuscation": False})
    assert [event["type"] for event in stream] == [*BEGIN, *[DELTA] * deltas, *END, "response.incomplete"]
    last = stream[-1]["response"]
    assert whole.keys() == last.keys() == stream[0]["response"].keys()
    assert last["incomplete_details"] == {"reason": "max_output_tokens"}
    for same in ("status", "incomplete_details", "store", "completed_at", "temperature"):
        assert last[same] == whole[same]
    assert text_of(last) == text_of(whole) == "".join(event["delta"] for event in stream if event["type"] == DELTA)
    assert stream[-2]["item"] == last["output"][0]


async def test_an_error_before_the_first_event_has_its_own_status() -> None:
    worker = FakeWorker("w", answer=None)
    async with client(worker) as responses:
        asked = asyncio.create_task(responses.post(stream=True))
        choice = await worker.arrived.get()
        choice.fail(RequestRefused(CODE_INTERNAL, INTERNAL, "a bug"))
        assert error_of(await asked, 500)["code"] == "internal"


@pytest.mark.parametrize(("reason", "code"), [(INTERNAL, "server_error"), (QUARANTINED, "invalid_prompt")])
async def test_an_error_after_the_first_event_is_a_failed_response_that_is_not_stored(reason: str, code: str) -> None:
    worker, store = FakeWorker("w", answer=None), new_store()
    async with client(worker, store=store) as responses, responses.stream(worker) as (choice, events):
        choice.tokens(2)
        begun = [await anext(events) for _ in range(5)]
        choice.fail(RequestRefused(code_of(reason) or 0, reason, "quoted \ud800"[:7]))
        rest = [event async for event in events]
        assert [event["type"] for event in (*begun, *rest)] == [*BEGIN, DELTA, "response.failed"]
        failed = rest[0]["response"]
        assert failed["id"] == begun[0]["response"]["id"]
        assert (failed["status"], failed["usage"], failed["store"]) == ("failed", None, False)
        assert failed["error"]["code"] == code
        assert failed["error"]["message"]
        assert (text_of(failed), failed["output"][0]["status"]) == ("xx", "incomplete")
        assert len(store._entries) == 0
        error_of(await responses.get(failed["id"]), 404)


async def test_an_error_after_a_comment_alone_is_a_whole_lifecycle() -> None:
    worker = FakeWorker("w", answer=None)
    edge = partial(Edge, keep_alive_s=0.01)
    async with client(worker, edge=edge) as responses:
        body = {"model": "tiny", "input": "hi", "stream": True}
        async with responses.http.stream("POST", "/v1/responses", json=body) as answer:
            lines = answer.aiter_lines()
            assert await anext(lines) == ": keep-alive"
            (await worker.arrived.get()).fail(RequestRefused(CODE_INTERNAL, INTERNAL, "a bug"))
            names = [line.removeprefix("event: ") async for line in lines if line.startswith("event: ")]
    assert names == ["response.created", "response.in_progress", "response.failed"]


async def test_a_client_that_goes_ends_its_request_and_stores_nothing() -> None:
    worker, store = FakeWorker("w", answer=None), new_store()
    async with client(worker, store=store) as responses:
        async with responses.stream(worker) as (choice, events):
            choice.tokens(1)
            await anext(events)
        await until(lambda: len(worker.aborted) == 1)
    assert len(store._entries) == 0


async def test_log_probabilities_come_with_the_tokens_and_at_the_end() -> None:
    worker = FakeWorker("w")
    async with client(worker) as responses:
        asks: Json = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
        stream = await responses.streamed(**asks)
        whole = await responses.response(**asks)
        none_on_top = await responses.response(include=["message.output_text.logprobs"])
    assert worker.submits[0].sampling.logprobs == whole["top_logprobs"] == 2
    logprobs = whole["output"][0]["content"][0]["logprobs"]
    assert len(logprobs) == 3
    for entry in logprobs:
        top = entry.pop("top_logprobs")
        assert top[0] == entry
        assert entry.keys() == {"token", "logprob", "bytes"}
        assert bytes(entry["bytes"]).decode() == entry["token"]
        assert [other["logprob"] for other in top] == [-0.5, -1.5]
        entry["top_logprobs"] = top
    deltas = [entry for event in stream if event["type"] == DELTA for entry in event["logprobs"]]
    done = next(event for event in stream if event["type"] == END[0])
    last = stream[-1]["response"]["output"][0]["content"][0]
    assert deltas == done["logprobs"] == last["logprobs"] == logprobs
    part = none_on_top["output"][0]["content"][0]
    assert [entry["top_logprobs"] for entry in part["logprobs"]] == [[], [], []]
