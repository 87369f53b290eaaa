"""A client of /v1/responses, over real HTTP."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2

from tests.router.cluster import PATIENCE_S, cluster
from tests.router.fake_worker import FakeChoice, FakeWorker
from tests.router.tokenizer_files import byte_tokenizer
from trunkline.status import CODE_UNAUTHENTICATED, UNAUTHENTICATED, RequestRefused
from trunkline.v1.generation_pb2 import FinishReason
from trunkline.v1.worker_pb2 import Submit
from trunkline_router.access.identity.identity import Identity, Role
from trunkline_router.edge.http_call import Edge
from trunkline_router.edge.responses.response_store import ResponseStore, StoreLimits

Json = dict[str, Any]

TOKENIZER = byte_tokenizer()
STOP = FinishReason.FINISH_REASON_STOP


class Clock:
    """A clock that stands until it is moved."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def new_store(
    clock: Clock | None = None, *, max_responses: int = 100, max_bytes: int = 1 << 20, ttl_s: float = 60.0
) -> ResponseStore:
    return ResponseStore(StoreLimits(max_responses, max_bytes, ttl_s), clock or Clock())


class Keys:
    """Credentials that are "tenant", or "tenant:blind" for callers that may not see cached tokens."""

    def identify(self, credential: str, host: str = "") -> Identity:
        tenant, _, kind = credential.partition(":")
        if tenant not in ("acme", "globex"):
            raise RequestRefused(CODE_UNAUTHENTICATED, UNAUTHENTICATED, "unknown credentials")
        return Identity(credential, tenant, frozenset({Role.USER}), sees_cache=kind != "blind")


class ResponsesClient:
    """Asks a router. A request is for the model "tiny" and has the input "hi", but for what is given."""

    def __init__(self, http: httpx2.AsyncClient) -> None:
        self.http = http

    async def post(self, *, headers: dict[str, str] | None = None, **body: Any) -> Any:
        """The answer of the server, whatever its status."""
        content = json.dumps(
            {"model": "tiny", "input": "hi", **body}
        )  # in ASCII: httpx2 itself cannot send a lone surrogate
        headers = {"content-type": "application/json", **(headers or {})}
        return await self.http.post("/v1/responses", content=content, headers=headers)

    async def response(self, *, key: str = "", **body: Any) -> Json:
        answer = await self.post(headers=bearer(key), **body)
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"] == "application/json"
        response: Json = answer.json()
        return response

    async def get(self, name: str, *, key: str = "", query: str = "") -> Any:
        return await self.http.get(f"/v1/responses/{name}{query}", headers=bearer(key))

    async def delete(self, name: str, *, key: str = "") -> Any:
        return await self.http.delete(f"/v1/responses/{name}", headers=bearer(key))

    async def streamed(self, **body: Any) -> list[Json]:
        """All events of a streamed request."""
        asked = asyncio.create_task(self.post(stream=True, **body))
        return [event async for event in events(asked)]

    @asynccontextmanager
    async def stream(
        self, worker: FakeWorker, **body: Any
    ) -> AsyncIterator[tuple[FakeChoice, AsyncGenerator[Json, None]]]:
        """A streamed request that has reached the worker, and its events as they come. The client goes at the end."""
        content = {"model": "tiny", "input": "hi", "stream": True, **body}
        request = self.http.build_request("POST", "/v1/responses", json=content)
        asked = asyncio.create_task(self.http.send(request, stream=True))
        try:
            choice = await worker.arrived.get()
            yield choice, events(asked)
        finally:
            asked.cancel()  # no effect once the response has begun
            [answer] = await asyncio.gather(asked, return_exceptions=True)
            if not isinstance(answer, BaseException):
                await answer.aclose()

    async def refusal(self, status: int = 400, **body: Any) -> Json:
        """The error of a request that is refused."""
        return error_of(await self.post(**body), status)


@asynccontextmanager
async def client(*workers: FakeWorker, **options: Any) -> AsyncIterator[ResponsesClient]:
    """A router before these workers, and a client of it."""
    options.setdefault("edge", Edge)
    async with cluster(*workers, **options) as router, http_client(router.http_port) as http:
        yield ResponsesClient(http)


def http_client(port: int) -> httpx2.AsyncClient:
    return httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S, trust_env=False)


async def events(asked: "asyncio.Task[httpx2.Response]") -> AsyncGenerator[Json, None]:
    """The events of a response, numbered without a gap, each with one line that names it and one with data. Comments
    are left out."""
    answer = await asked
    assert answer.status_code == 200, await answer.aread()
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    lines = answer.aiter_lines()
    number = 0
    async for line in lines:
        if not line or line.startswith(":"):
            continue
        name = line.removeprefix("event: ")
        assert name != line
        event: Json = json.loads((await anext(lines)).removeprefix("data: "))
        assert (event["type"], event["sequence_number"]) == (name, number)
        assert await anext(lines) == "", "an event ends with an empty line"
        number += 1
        yield event


def error_of(answer: Any, status: int) -> Json:
    """The error object of an answer in OpenAI's shape."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    error: Json = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"} if key else {}


def prompt_of(submit: Submit) -> str:
    """The text of the prompt that a worker got."""
    text: str = TOKENIZER.decode(list(submit.prompt_token_ids), skip_special_tokens=False)
    return text


def text_of(response: Json) -> str:
    """The text of a response with one message of one part."""
    [item] = response["output"]
    [part] = item["content"]
    text: str = part["text"]
    return text
