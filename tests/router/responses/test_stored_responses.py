"""Responses that are stored: retrieved, deleted and continued by their own tenant."""

import asyncio
from typing import Any

import pytest

from tests.router.fake_worker import FakeWorker
from tests.router.responses.responses_client import (
    STOP,
    Clock,
    Json,
    Keys,
    ResponsesClient,
    client,
    error_of,
    http_client,
    new_store,
    prompt_of,
    text_of,
)
from tests.router.router_process import SERVING, start, until_health
from trunkline_bench.servers.ports import free_port
from trunkline_router.access.access import Access
from trunkline_router.edge.responses.response_store import ENTRY_BYTES, TENANT_PART
from trunkline_runtime.channel import open_channel


async def answered(responses: ResponsesClient, worker: FakeWorker, text: str, **body: Any) -> Json:
    """A response with this text."""
    asked = asyncio.create_task(responses.response(**body))
    (await worker.arrived.get()).tokens(2, text=text, finish=True, ending=STOP)
    response = await asked
    assert text_of(response) == text
    return response


@pytest.mark.parametrize("store", [None, True])
async def test_a_response_is_retrieved_as_it_was_answered_and_can_be_deleted(store: bool | None) -> None:
    async with client(FakeWorker("w"), store=new_store()) as responses:
        response = await responses.response(store=store, metadata={"ticket": "7"})
        assert response["store"] is True
        name = response["id"]
        for query in (
            "",
            "?include=message.output_text.logprobs&stream=false",
            "?include[]=x&include_obfuscation=true",
        ):
            got = await responses.get(name, query=query)
            assert (got.status_code, got.json()) == (200, response)
        deleted = await responses.delete(name)
        assert (deleted.status_code, deleted.json()) == (200, {"id": name, "object": "response", "deleted": True})
        for again in (await responses.get(name), await responses.delete(name)):
            error = error_of(again, 404)
            assert (error["code"], error["type"]) == ("response_not_found", "invalid_request_error")


async def test_a_stored_response_tells_cached_tokens_only_to_callers_that_may_see_them() -> None:
    async with client(FakeWorker("w"), store=new_store(), access=Access(identify=Keys().identify)) as responses:
        for _ in range(2):
            response = await responses.response(key="acme", input="a prompt of several blocks")
        assert response["usage"]["input_tokens_details"]["cached_tokens"] > 0
        got = await responses.get(response["id"], key="acme:blind")
        response["usage"]["input_tokens_details"]["cached_tokens"] = 0
        assert got.json() == response


async def test_a_streamed_response_is_stored_by_the_time_it_is_complete() -> None:
    worker = FakeWorker("w", answer=None)
    async with client(worker, store=new_store()) as responses, responses.stream(worker) as (choice, events):
        choice.tokens(1)
        created = await anext(events)
        error_of(await responses.get(created["response"]["id"]), 404)
        choice.tokens(1, finish=True, ending=STOP)
        async for event in events:
            if event["type"] == "response.completed":
                assert (await responses.get(created["response"]["id"])).json() == event["response"]
                return
    raise AssertionError("the response did not complete")


async def test_what_must_not_be_stored_is_not() -> None:
    store = new_store()
    async with client(FakeWorker("w"), store=store) as responses:
        response = await responses.response(store=False)
        assert response["store"] is False
        error_of(await responses.get(response["id"]), 404)
        await responses.streamed(store=False)
        assert len(store._entries) == 0


async def test_a_response_that_is_too_large_for_the_store_says_so() -> None:
    store = new_store(max_bytes=TENANT_PART * 6 * ENTRY_BYTES)
    worker = FakeWorker("w", context_length=8192, kv_token_capacity=8192)
    async with client(worker, store=store) as responses:
        assert (await responses.response())["store"] is True
        assert (await responses.response(input="x" * 6 * ENTRY_BYTES))["store"] is False
        stream = await responses.streamed(metadata={str(n): "x" * 512 for n in range(8)})
        assert stream[-1]["response"]["store"] is False
        assert len(store._entries) == 1


async def test_without_a_store_nothing_is_found() -> None:
    async with client(FakeWorker("w")) as responses:
        response = await responses.response()
        assert response["store"] is False
        for answer in (await responses.get(response["id"]), await responses.delete(response["id"])):
            assert "stores no responses" in error_of(answer, 404)["message"]
        error = await responses.refusal(previous_response_id=response["id"])
        assert (error["code"], error["param"]) == ("previous_response_not_found", "previous_response_id")


async def test_a_response_continues_the_whole_conversation_without_its_instructions() -> None:
    worker = FakeWorker("w", answer=None)
    async with client(worker, store=new_store()) as responses:
        first = await answered(responses, worker, "A", input="one", instructions="be kind")
        part = [{"role": "user", "content": [{"type": "input_text", "text": "two"}]}]
        second = await answered(responses, worker, "B", input=part, previous_response_id=first["id"])
        assert (second["previous_response_id"], second["instructions"]) == (first["id"], None)
        await answered(responses, worker, "C", input="three", instructions="x", previous_response_id=second["id"])
        await answered(responses, worker, "D", input="other", previous_response_id=first["id"], store=False)
        await answered(responses, worker, "E", input=None, previous_response_id=first["id"])
    one, two = "<s>user:one</s><s>assistant:A</s>", "<s>user:two</s><s>assistant:B</s>"
    end = "<s>assistant:"
    assert [prompt_of(submit) for submit in worker.submits] == [
        f"<s>system:be kind</s><s>user:one</s>{end}",
        f"{one}<s>user:two</s>{end}",
        f"<s>system:x</s>{one}{two}<s>user:three</s>{end}",
        f"{one}<s>user:other</s>{end}",
        f"{one}{end}",
    ]


async def test_a_streamed_response_can_be_continued() -> None:
    worker = FakeWorker("w")
    async with client(worker, store=new_store()) as responses:
        first = (await responses.streamed(input="one"))[-1]["response"]
        await responses.streamed(input="two", previous_response_id=first["id"])
    assert prompt_of(worker.submits[1]) == "<s>user:one</s><s>assistant:xxx</s><s>user:two</s><s>assistant:"


async def test_a_response_that_is_gone_cannot_be_continued_but_those_that_did_can() -> None:
    worker = FakeWorker("w")
    async with client(worker, store=new_store()) as responses:
        first = await responses.response(input="one")
        second = await responses.response(input="two", previous_response_id=first["id"])
        await responses.delete(first["id"])
        error = await responses.refusal(previous_response_id=first["id"])
        assert error["code"] == "previous_response_not_found"
        await responses.response(input="three", previous_response_id=second["id"])
    assert len(worker.submits) == 3
    assert prompt_of(worker.submits[2]).startswith("<s>user:one</s><s>assistant:xxx</s><s>user:two</s>")


async def test_a_conversation_cannot_grow_beyond_the_context() -> None:
    async with client(FakeWorker("w", context_length=64), store=new_store()) as responses:
        first = await responses.response(input="x" * 30)
        error = await responses.refusal(input="x" * 30, previous_response_id=first["id"])
        assert error["code"] == "context_length_exceeded"


async def test_old_responses_expire_and_the_oldest_goes_when_a_tenant_has_too_many() -> None:
    clock = Clock()
    async with client(FakeWorker("w"), store=new_store(clock, max_responses=2, ttl_s=60.0)) as responses:
        names = [(await responses.response())["id"] for _ in range(3)]

        async def statuses() -> list[int]:
            return [(await responses.get(name)).status_code for name in names]

        assert await statuses() == [404, 200, 200]
        clock.now_s += 59.9
        assert await statuses() == [404, 200, 200]
        clock.now_s += 0.1
        assert await statuses() == [404, 404, 404]
        assert (await responses.refusal(previous_response_id=names[2]))["code"] == "previous_response_not_found"


async def test_another_tenant_does_not_find_a_response() -> None:
    worker = FakeWorker("w")
    async with client(worker, access=Access(identify=Keys().identify), store=new_store()) as responses:
        name = (await responses.response(key="acme"))["id"]
        unknown = error_of(await responses.get("resp_" + "0" * 48, key="globex"), 404)
        theirs = error_of(await responses.get(name, key="globex"), 404)
        assert theirs["message"] == unknown["message"].replace("resp_" + "0" * 48, name), "as one that never was"
        error_of(await responses.delete(name, key="globex"), 404)
        answer = await responses.post(headers={"authorization": "Bearer globex"}, previous_response_id=name)
        assert error_of(answer, 400)["code"] == "previous_response_not_found"
        assert (await responses.get(name, key="acme")).status_code == 200
        assert len(worker.submits) == 1


async def test_ids_are_random_and_say_nothing_of_the_request() -> None:
    async with client(FakeWorker("w"), store=new_store()) as responses:
        names = {(await responses.post(headers={"x-request-id": "same"})).json()["id"] for _ in range(3)}
        assert len(names) == 3
        assert all(len(name) == len("resp_") + 48 and "same" not in name for name in names)


@pytest.mark.parametrize("query", ["?stream=true", "?stream=1", "?starting_after=3"])
async def test_a_stored_response_is_not_streamed(query: str) -> None:
    async with client(FakeWorker("w"), store=new_store()) as responses:
        name = (await responses.response())["id"]
        error = error_of(await responses.get(name, query=query), 400)
        assert error["param"] == query[1:].partition("=")[0]
        assert error_of(await responses.get(name, query="?mood=good"), 400)["param"] == "mood"


async def test_a_router_that_runs_stores_as_its_settings_say() -> None:
    worker = FakeWorker("w")
    await worker.start()
    port, http_port = free_port(), free_port()
    flags = (f"--workers={worker.address}", f"--port={port}", f"--http-port={http_port}", "--max-stored-responses=1")
    process = await start(*flags)
    try:
        async with open_channel(f"127.0.0.1:{port}") as channel:
            await until_health(channel, "readiness", SERVING)
        async with http_client(http_port) as http:
            responses = ResponsesClient(http)
            first, second = [await responses.response() for _ in range(2)]
            assert (await responses.get(second["id"])).json() == second
            error_of(await responses.get(first["id"]), 404)
    finally:
        process.terminate()
        await process.communicate()
        await worker.die()
    assert process.returncode == 0
