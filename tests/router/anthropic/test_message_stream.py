"""POST /v1/messages with a stream."""

import pytest

from tests.router.anthropic.messages_client import client, text_of
from tests.router.cluster import until
from tests.router.fake_worker import FakeWorker
from trunkline.status import CODE_INTERNAL, INTERNAL, RequestRefused
from trunkline.v1.generation_pb2 import FinishReason

STOP = FinishReason.FINISH_REASON_STOP


async def test_the_events_come_in_order_as_the_tokens_do() -> None:
    worker = FakeWorker("w", answer=None)
    async with client(worker) as messages, messages.stream(worker) as (choice, events):
        choice.tokens(1, text="é\n")
        prompt_tokens = len(choice.submit.prompt_token_ids)
        start = await anext(events)
        message = start.pop("message")
        assert start == {"type": "message_start"}
        assert message["id"].startswith("msg_")
        assert (message["content"], message["stop_reason"], message["stop_sequence"]) == ([], None, None)
        assert (message["usage"]["input_tokens"], message["usage"]["output_tokens"]) == (prompt_tokens, 0)
        assert await anext(events) == {
            "type": "content_block_start",
            "index": 0,
            "content_block": {"type": "text", "text": "", "citations": []},
        }
        assert await anext(events) == {
            "type": "content_block_delta",
            "index": 0,
            "delta": {"type": "text_delta", "text": "é\n"},
        }
        choice.tokens(1, text="")  # half a character: nothing to tell
        choice.tokens(1, text='"b"')
        assert (await anext(events))["delta"]["text"] == '"b"'
        choice.tokens(1, text="c", finish=True, ending=STOP, stop_string="END")
        assert (await anext(events))["delta"]["text"] == "c"
        assert [event async for event in events] == [
            {"type": "content_block_stop", "index": 0},
            {
                "type": "message_delta",
                "delta": {
                    "stop_reason": "stop_sequence",
                    "stop_sequence": "END",
                    "stop_details": None,
                    "container": None,
                },
                "usage": {
                    "input_tokens": prompt_tokens,
                    "cache_creation_input_tokens": 0,
                    "cache_read_input_tokens": 0,
                    "output_tokens": 4,
                    "output_tokens_details": None,
                    "server_tool_use": None,
                },
            },
            {"type": "message_stop"},
        ]


@pytest.mark.parametrize(("answer", "deltas"), [(5, 1), (0, 0)])
async def test_a_stream_tells_what_the_whole_message_does(answer: int, deltas: int) -> None:
    async with client(FakeWorker("w", answer=answer)) as messages:
        whole = await messages.message(max_tokens=5)
        stream = await messages.streamed(max_tokens=5)
    kinds = [event["type"] for event in stream]
    assert kinds == [
        *("message_start", "content_block_start"),
        *["content_block_delta"] * deltas,
        *("content_block_stop", "message_delta", "message_stop"),
    ]
    assert text_of(stream) == whole["content"][0]["text"]
    first, ending = stream[0]["message"], stream[-2]
    assert first.keys() == whole.keys()
    assert first["usage"].keys() == whole["usage"].keys()
    assert ending["delta"]["stop_reason"] == whole["stop_reason"]
    total = [usage["input_tokens"] + usage["cache_read_input_tokens"] for usage in (ending["usage"], whole["usage"])]
    assert total[0] == total[1]
    assert ending["usage"]["output_tokens"] == whole["usage"]["output_tokens"] == answer


async def test_an_error_after_the_first_event_is_the_last_event() -> None:
    worker = FakeWorker("w", answer=None)
    async with client(worker) as messages, messages.stream(worker) as (choice, events):
        choice.tokens(1)
        assert [(await anext(events))["type"] for _ in range(3)][-1] == "content_block_delta"
        choice.fail(RequestRefused(CODE_INTERNAL, INTERNAL, "block 7 is held twice"))
        (error,) = [event async for event in events]
        assert error.keys() == {"type", "error", "request_id"}
        assert (error["type"], error["error"]["type"]) == ("error", "api_error")
        assert error["request_id"] in error["error"]["message"]


async def test_an_error_before_the_first_event_has_its_own_status() -> None:
    worker = FakeWorker("w", answer=None)
    async with client(worker) as messages:
        response = await messages.post(stream=True, model="large")
        assert response.status_code == 404
        assert response.json()["error"]["type"] == "not_found_error"


async def test_a_cancelled_answer_is_not_taken_for_a_whole_one() -> None:
    worker = FakeWorker("w", answer=None)
    async with client(worker) as messages, messages.stream(worker) as (choice, events):
        choice.tokens(1)
        choice.tokens(1, finish=True, ending=FinishReason.FINISH_REASON_ABORT)
        error = [event async for event in events][-1]
        assert (error["type"], error["error"]["type"]) == ("error", "overloaded_error")


async def test_a_client_that_goes_ends_its_request_at_the_worker() -> None:
    worker = FakeWorker("w", answer=None)
    async with client(worker) as messages:
        async with messages.stream(worker) as (choice, events):
            choice.tokens(1)
            await anext(events)
            assert not worker.aborted
        await until(lambda: worker.aborted == [choice.submit])
