"""Requests of all kinds through a router: answered, cached, refused, cancelled, failed over."""

import asyncio
import contextlib
import json
import socket
from collections.abc import Awaitable, Callable
from itertools import count

import httpx

from trunkline import Client
from trunkline.errors import TrunklineError

STORY = "Once upon a time there was a fox that lived in a small house by the river. "
MODEL = "tiny-tales"
TENANTS = ("acme", "labs", "greedy")


class MixedLoad:
    """grpc: HOST:PORT; http: URL of the same router"""

    def __init__(self, grpc: str, http: str) -> None:
        self._grpc = grpc
        self._http = http
        self._number = count()
        self.answered = 0
        self._one_answered = asyncio.Condition()

    async def run(self, is_over: Callable[[], bool], users: int = 6) -> None:
        """Until it is over."""
        clients = [Client(self._grpc, tenant=tenant, retries=0, connections=2) for tenant in TENANTS]
        async with contextlib.AsyncExitStack() as stack:
            for client in clients:
                await stack.enter_async_context(client)
            web = await stack.enter_async_context(httpx.AsyncClient(base_url=self._http, timeout=60.0))
            while not is_over():
                await asyncio.gather(*(self._ask(clients, web) for _ in range(users)))

    async def until_answered(self, number: int) -> None:
        """Returns when so many requests have been answered, in whichever way."""
        async with self._one_answered:
            await self._one_answered.wait_for(lambda: self.answered >= number)

    async def many_streams(self, accident: Callable[[str], None], streams: int = 48) -> None:
        """Long streams. The accident happens to the worker of the one that begins first, when most have not begun."""
        begun = False

        headers = {"x-trunkline-tenant": "labs"}

        async def stream(web: httpx.AsyncClient, number: int) -> None:
            nonlocal begun
            body = {"model": MODEL, "prompt": f"{number} {STORY * 4}", "max_tokens": 200, "stream": True}
            async with web.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
                async for _ in answer.aiter_bytes():
                    if not begun:
                        begun = True
                        accident(answer.headers["x-trunkline-worker"])

        limits = httpx.Limits(max_connections=streams)
        async with httpx.AsyncClient(base_url=self._http, timeout=60.0, limits=limits) as web:
            await asyncio.gather(*(stream(web, number) for number in range(streams)))

    async def client_that_does_not_read(self, noticed: Callable[[], Awaitable[None]]) -> None:
        """Asks for a stream with much output, and reads it only when it was noticed that the output waits."""
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.setblocking(False)
            loop = asyncio.get_running_loop()
            url = httpx.URL(self._http)
            await loop.sock_connect(connection, (url.host, url.port))
            wanted = {"model": MODEL, "prompt": STORY, "max_tokens": 200, "n": 8, "logprobs": 20, "stream": True}
            body = json.dumps(wanted).encode()
            lines = (
                "POST /v1/completions HTTP/1.1",
                "Host: 127.0.0.1",
                "Content-Type: application/json",
                f"Content-Length: {len(body)}",
                "Connection: close",
            )
            await loop.sock_sendall(connection, "\r\n".join((*lines, "", "")).encode() + body)
            await noticed()
            answer = bytearray()
            while received := await loop.sock_recv(connection, 1 << 16):
                answer += received
            assert answer.startswith(b"HTTP/1.1 200"), answer[:500]

    async def _ask(self, clients: list[Client], web: httpx.AsyncClient) -> None:
        number = next(self._number)
        client = clients[number % len(clients)]
        prompt = STORY * (1 + number % 3)
        with contextlib.suppress(TrunklineError, httpx.HTTPError):  # refusals and lost workers belong to the mixture
            match number % 8:
                case 0:
                    await client.complete(prompt, max_tokens=8, n=2, temperature=1.0)
                case 1:
                    async for _ in client.generate(prompt, max_tokens=64):
                        break  # cancelled
                case 2:
                    await web.post("/v1/completions", json={"prompt": prompt, "max_tokens": 8, "temperature": -1})
                case 3 | 4:
                    body = {"model": MODEL, "messages": [{"role": "user", "content": prompt}], "max_tokens": 8}
                    headers = {"x-trunkline-tenant": TENANTS[number % 2]}
                    await web.post("/v1/chat/completions", json=body, headers=headers)
                case 5:
                    await client.complete(f"{number} {prompt}", max_tokens=150, lane="interactive")
                case _:
                    await client.complete(prompt, max_tokens=24, lane="batch")
            async with self._one_answered:
                self.answered += 1
                self._one_answered.notify_all()
