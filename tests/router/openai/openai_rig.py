"""A client of the OpenAI endpoints of a router before fake workers, over real HTTP."""

import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2

from tests.router.cluster import PATIENCE_S, Cluster, cluster
from tests.router.fake_worker import FakeWorker
from trunkline_router.edge.http_call import Edge
from trunkline_router.edge.request_fields import Result, Steps

Json = dict[str, Any]
CHAT = [{"role": "user", "content": "hi"}]


def result_of(steps: Steps[Result]) -> Result:
    """Returns what the steps return."""
    while True:
        try:
            next(steps)
        except StopIteration as ended:
            result: Result = ended.value
            return result


class OpenAiClient:
    """`router` is what it calls."""

    def __init__(self, http: httpx2.AsyncClient, router: Cluster) -> None:
        self.http = http
        self.router = router

    async def post(self, path: str, body: Any, **headers: str) -> httpx2.Response:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.http.post(path, content=content, headers={"content-type": "application/json", **named})

    async def answer(self, path: str, **body: Any) -> Json:
        answer = await self.post(path, {"model": "tiny", **body})
        assert answer.status_code == 200, answer.text
        whole: Json = answer.json()
        return whole

    async def refusal(self, path: str, status: int = 400, **body: Any) -> Json:
        answer = await self.post(path, {"model": "tiny", **body})
        assert answer.status_code == status, answer.text
        error: Json = answer.json()["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        return error

    async def events(self, path: str, **body: Any) -> AsyncGenerator[Any, None]:
        """The data of each event of a stream, as JSON; the last one, [DONE], as text."""
        content = {"model": "tiny", "stream": True, **body}
        async with self.http.stream("POST", path, json=content) as answer:
            assert answer.status_code == 200, await answer.aread()
            assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
            async for line in answer.aiter_lines():
                if line and not line.startswith(":"):
                    assert line.startswith("data: "), line
                    data = line.removeprefix("data: ")
                    yield data if data == "[DONE]" else json.loads(data)

    async def all_events(self, path: str, **body: Any) -> list[Any]:
        return [event async for event in self.events(path, **body)]

    async def chat(self, **body: Any) -> Json:
        return await self.answer("/v1/chat/completions", messages=CHAT, **body)

    async def complete(self, prompt: Any = "hi", **body: Any) -> Json:
        return await self.answer("/v1/completions", prompt=prompt, **body)


@asynccontextmanager
async def client(*workers: FakeWorker, **options: Any) -> AsyncIterator[OpenAiClient]:
    """A router before these workers, and a client of it."""
    options.setdefault("edge", Edge)
    async with cluster(*workers, **options) as router:
        address = f"http://127.0.0.1:{router.http_port}"
        async with httpx2.AsyncClient(base_url=address, timeout=PATIENCE_S, trust_env=False) as http:
            yield OpenAiClient(http, router)
