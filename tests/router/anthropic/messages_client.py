"""A client of /v1/messages, over real HTTP."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx2

from tests.router.cluster import PATIENCE_S, Cluster, cluster
from tests.router.fake_worker import FakeChoice, FakeWorker
from tests.router.tokenizer_files import byte_tokenizer
from trunkline.v1.worker_pb2 import Submit
from trunkline_router.edge.http_call import Edge

Json = dict[str, Any]

HI: Json = {"role": "user", "content": "hi"}
TOKENIZER = byte_tokenizer()


class MessagesClient:
    """Asks `router`. A request asks for 8 tokens in answer to "hi", but for what is given."""

    def __init__(self, router: Cluster, http: httpx2.AsyncClient) -> None:
        self.router = router
        self.http = http

    async def post(self, *, path: str = "/v1/messages", headers: dict[str, str] | None = None, **body: Any) -> Any:
        """The response, whatever its status."""
        return await self.http.post(path, json={"max_tokens": 8, "messages": [HI], **body}, headers=headers)

    async def message(self, **body: Any) -> Json:
        response = await self.post(**body)
        assert response.status_code == 200, response.text
        message: Json = response.json()
        return message

    async def count(self, **body: Any) -> int:
        given = {"messages": [HI], **body}
        response = await self.http.post("/v1/messages/count_tokens", json=given)
        assert response.status_code == 200, response.text
        counted: Json = response.json()
        assert list(counted) == ["input_tokens"]
        count: int = counted["input_tokens"]
        return count

    @asynccontextmanager
    async def stream(
        self, worker: FakeWorker, **body: Any
    ) -> AsyncIterator[tuple[FakeChoice, AsyncGenerator[Json, None]]]:
        """A streamed request that has reached the worker, and its events as they come. The client goes at the end."""
        body = {"max_tokens": 8, "messages": [HI], "stream": True, **body}
        request = self.http.build_request("POST", "/v1/messages", json=body)
        asked = asyncio.create_task(self.http.send(request, stream=True))
        try:
            choice = await arrived(worker)
            yield choice, events(asked)
        finally:
            asked.cancel()  # no effect once the response has begun
            [response] = await asyncio.gather(asked, return_exceptions=True)
            if not isinstance(response, BaseException):
                await response.aclose()

    async def streamed(self, **body: Any) -> list[Json]:
        """All events of a streamed request."""
        asked = asyncio.create_task(self.post(stream=True, **body))
        return [event async for event in events(asked)]

    async def refusal(self, **body: Any) -> Json:
        """The error of a request that is refused with 400."""
        response = await self.post(**body)
        assert response.status_code == 400, response.text
        return error_of(response)


@asynccontextmanager
async def client(*workers: FakeWorker, **options: Any) -> AsyncIterator[MessagesClient]:
    """A router before these workers, and a client of it."""
    options.setdefault("edge", Edge)
    async with cluster(*workers, **options) as router:
        url = f"http://127.0.0.1:{router.http_port}"
        async with httpx2.AsyncClient(base_url=url, timeout=PATIENCE_S, trust_env=False) as http:
            yield MessagesClient(router, http)


async def events(asked: "asyncio.Task[httpx2.Response]") -> AsyncGenerator[Json, None]:
    """The events of a response, each with one line that names it and one with data. Comments are left out."""
    response = await asked
    assert response.status_code == 200, await response.aread()
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    lines = response.aiter_lines()
    async for line in lines:
        if not line or line.startswith(":"):
            continue
        name = line.removeprefix("event: ")
        assert name != line
        event: Json = json.loads((await anext(lines)).removeprefix("data: "))
        assert event["type"] == name, "clients go by the name"
        assert await anext(lines) == "", "an event ends with an empty line"
        yield event


def error_of(response: Any) -> Json:
    """The error object of a response in Anthropic's shape."""
    body: Json = response.json()
    assert body.keys() == {"type", "error", "request_id"}
    assert body["type"] == "error"
    assert {"type", "message"} <= body["error"].keys() <= {"type", "message", "details"}
    assert body["request_id"] == response.headers["request-id"]
    assert response.headers["content-type"] == "application/json"
    error: Json = body["error"]
    return error


def prompt_of(submit: Submit) -> str:
    """The text of the prompt that a worker got."""
    text: str = TOKENIZER.decode(list(submit.prompt_token_ids), skip_special_tokens=False)
    return text


def text_of(stream: Sequence[Json]) -> str:
    return "".join(event["delta"]["text"] for event in stream if event["type"] == "content_block_delta")


async def arrived(worker: FakeWorker) -> FakeChoice:
    return await worker.arrived.get()
