"""Nothing that a run writes has a prompt, an output, a key or a token in it: logs, spans, metrics, Redis, files."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx2
import pytest
import redis

from tests.cluster.canaries import Canaries
from tests.cluster.canary_calls import ToolTalk
from tests.cluster.collector import Collector, collecting
from tests.cluster.processes import START_S, Process, Worker, script, wait_until
from tests.playing.families import HERMES
from tests.playing.worker import COMMAND
from tests.router.identity import issuer, key_rig
from tests.worker.engine_rig import DEMO_MODEL
from trunkline import Client, TrunklineError
from trunkline.errors import InvalidRequest
from trunkline.v1.fleet_pb2 import ExplainRouteRequest
from trunkline.v1.fleet_pb2_grpc import FleetServiceStub
from trunkline.v1.generation_pb2 import SamplingParams, ToolCall
from trunkline.v1.inference_pb2 import (
    ChatMessage,
    ChatMessages,
    ChatPart,
    DetokenizeRequest,
    GenerateRequest,
    TokenIds,
    TokenizeRequest,
    ToolResult,
)
from trunkline.v1.inference_pb2_grpc import InferenceServiceStub
from trunkline_bench.servers.ports import free_port
from trunkline_bench.servers.redis_server import RedisServer
from trunkline_router.access.identity.api_keys import ApiKey
from trunkline_router.access.keys.new_key import new_key

MODEL, PLAYER = "tiny-tales", "player"
REQUEST_ID = "a-request-id-may-be-written"
SESSION = "x-trunkline-session"
TELEMETRY_S = 60.0
OF_ROUTER = "trunkline_router_event_loop_lag_seconds"

Headers = dict[str, str]


EVENTS = "/fleet/events"
OBSERVED = ("/metrics", "/fleet/requests", EVENTS)


@dataclass
class Rig:
    """The run under test, and what watches it."""

    folder: Path
    canaries: Canaries
    collector: Collector
    redis: RedisServer
    key: ApiKey
    token: str
    wrong_key: ApiKey
    port: int
    http_port: int
    question: str  # that the player answers with a call of a tool
    processes: list[Process] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)  # that Redis was sent

    @property
    def bearer(self) -> Headers:
        return {"authorization": f"Bearer {self.key.credential}"}


def environment(folder: Path, collector: Collector, canaries: Canaries) -> dict[str, str]:
    """Secrets are canaries too, and files that a process makes are in the folder."""
    return {
        **collector.environment(),
        "TMPDIR": str(folder),
        "HOME": str(folder),
        "TRUNKLINE_GRANT_KEY": canaries.plant("grant key") + "g" * 32,
        "TRUNKLINE_FLEET_SECRET": canaries.plant("fleet secret") + "s" * 32,
    }


@contextmanager
def run(folder: Path, redis_server: RedisServer) -> Iterator[Rig]:
    canaries = Canaries()
    key, wrong_key = new_key(), new_key()
    canaries.keep("key", key.secret)
    canaries.keep("wrong key", wrong_key.secret)
    issued = issuer.claims(exp=time.time() + 3600, nbf=time.time() - 60, roles=["user", "operator"])
    token = issuer.token(issued)
    for place, part in zip(("token's claims", "token's signature"), token.split(".")[1:], strict=True):
        canaries.keep(place, part)
    key_rig.write(folder / "keys.json", key_rig.record(key, roles=["user", "operator", "scraper"], may_salt=True))
    (folder / "jwks.json").write_bytes(issuer.jwks("ed25519"))
    (folder / "tenants.json").write_text('{"acme": {"requests_per_minute": 100000, "tokens_per_minute": 100000000}}')
    with ExitStack() as stack:
        collector = stack.enter_context(collecting())
        variables = environment(folder, collector, canaries)
        worker = Worker(DEMO_MODEL, "--dtype=float32", "--kv-blocks=256", environment=variables)
        stack.callback(worker.stop)
        worker.wait_ready()
        question = canaries.plant("question")
        thought, said = HERMES.thought(canaries.plant("reasoning")), canaries.plant("text beside a call")
        call = HERMES.call(canaries.plant("called tool"), {canaries.plant("argument"): canaries.plant("its value")})
        model = HERMES.write(folder.parent / PLAYER, {question: thought + said + call})
        player = Worker(model, "--dtype=float32", "--kv-blocks=256", environment=variables, command=COMMAND)
        stack.callback(player.stop)
        player.wait_ready()
        port, http_port = free_port(), free_port()
        router = Process(
            script("trunkline-router"),
            *(f"--workers={worker.address},{player.address}", f"--port={port}", f"--http-port={http_port}"),
            *(f"--redis-url={redis_server.url}", f"--tenants={folder}/tenants.json"),
            *(f"--api-keys={folder}/keys.json", f"--jwt-jwks={folder}/jwks.json"),
            *(f"--jwt-issuer={issuer.ISSUER}", f"--jwt-audience={issuer.AUDIENCE}", "--max-stored-responses=10"),
            environment=variables,
        )
        stack.callback(router.stop)
        rig = Rig(folder, canaries, collector, redis_server, key, token, wrong_key, port, http_port, question)
        rig.processes += [router, worker.process, player.process]
        stack.enter_context(watched(rig))
        router.wait_for("router listening")
        url, headers = f"http://127.0.0.1:{http_port}", rig.bearer

        def num_models() -> int:
            return len(httpx2.get(f"{url}/v1/models", headers=headers, timeout=START_S, trust_env=False).json()["data"])

        wait_until(lambda: num_models() == 2, "both workers are connected")
        yield rig


def answer_of(rig: Rig, path: str) -> str:
    """What operators and scrapers are answered; of a stream, its first event."""
    url = f"http://127.0.0.1:{rig.http_port}{path}"
    with httpx2.stream("GET", url, headers=rig.bearer, timeout=START_S, trust_env=False) as answer:
        assert answer.status_code == 200
        if path == EVENTS:
            return next(line for line in answer.iter_lines() if line.startswith("data: "))
        return answer.read().decode()


@contextmanager
def watched(rig: Rig) -> Iterator[None]:
    """Keeps every command that Redis is sent, also by scripts: keys may expire."""
    client: Any = redis.Redis.from_url(rig.redis.url, socket_timeout=None)  # it may send no command for a while
    stopped = threading.Event()
    with client.monitor() as monitor:

        def follow() -> None:
            while not stopped.is_set():
                rig.commands.append(repr(monitor.next_command()))

        thread = threading.Thread(target=follow)
        thread.start()
        try:
            yield
        finally:
            stopped.set()
            redis.Redis.from_url(rig.redis.url).ping()  # the last command that it sees
            thread.join()
    client.close()


async def test_no_canary_is_written_anywhere(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    with RedisServer() as redis_server:
        with run(folder, redis_server) as rig:
            await over_grpc(rig)
            await over_http(rig)
            await with_tools(rig)
            await with_wrong_credentials(rig)
            over_sockets(rig)
            telemetry = await asyncio.to_thread(exported, rig)
            telemetry |= {path: await asyncio.to_thread(answer_of, rig, path) for path in OBSERVED}
            stored = contents(redis.Redis.from_url(redis_server.url))
            await a_lost_worker(rig)
        files = b"\n".join(path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file())
    logs = "\n".join(line for process in rig.processes for line in process.lines)
    commands = "\n".join(rig.commands)
    telemetry["spans"] = rig.collector.text("spans")
    assert '"request ended"' in logs
    assert REQUEST_ID in logs
    assert "unexpected error" not in logs
    assert REQUEST_ID in telemetry["spans"]
    for name in ("trunkline.complete_tool_calls", "gen_ai.usage.reasoning.output_tokens"):
        assert name in telemetry["spans"]
    assert '"reasoning_tokens"' in logs
    assert "trunkline_router_tool_calls_total" in telemetry["/metrics"]
    assert OF_ROUTER in telemetry["metrics"]
    assert OF_ROUTER in telemetry["/metrics"]
    assert REQUEST_ID in telemetry["/fleet/requests"]
    assert "acme" in stored
    assert "EVALSHA" in commands
    assert b"sha256:" in files
    assert rig.canaries.num_planted > 40
    written: dict[str, str | bytes] = {"logs": logs, **telemetry, "Redis": stored, "commands": commands, "files": files}
    leaks = [f"{where}: {leak}" for where, text in written.items() for leak in rig.canaries.found(text)]
    assert not leaks, "\n".join(leaks)


async def over_grpc(rig: Rig) -> None:
    plant, keep = rig.canaries.plant, rig.canaries.keep
    session = ((SESSION, plant("session")),)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{rig.port}") as channel:
        stub: Any = InferenceServiceStub(channel)
        fleet: Any = FleetServiceStub(channel)
        for headers in (rig.bearer, {"authorization": f"Bearer {rig.token}"}):
            metadata = (*headers.items(), *session, (plant("header").lower(), plant("header value")))

            async def generate(**fields: Any) -> str:
                call = stub.Generate(GenerateRequest(**{"model": MODEL, **fields}), metadata=metadata, timeout=START_S)  # noqa: B023
                return "".join([chunk.text async for response in call for chunk in response.chunks])

            def sampled(**fields: Any) -> SamplingParams:
                return SamplingParams(max_tokens=16, ignore_eos=True, **fields)

            text = await generate(text=f"Once {plant('text')} ", sampling=sampled(), request_id=REQUEST_ID)
            keep("output", text)
            stops = [plant("stop string")]
            await generate(text="Once upon", sampling=sampled(stop=stops))
            chat = ChatMessages(
                messages=[ChatMessage(role="user", content=plant("chat"))],
                template_variables=json.dumps({plant("template variable"): plant("template value")}),
            )
            await generate(chat=chat, sampling=sampled())
            refused: dict[str, dict[str, Any]] = {
                "unknown model": {"model": plant("model"), "text": plant("text for an unknown model")},
                "role": {"chat": ChatMessages(messages=[ChatMessage(role=plant("role"), content=plant("content"))])},
                "arguments": {"chat": _called(plant("tool"), plant("no JSON for a tool"), plant("result"))},
                "no place for tools": {"chat": _called(plant("another tool"), "{}", plant("another result"))},
                "variables": {"chat": ChatMessages(messages=chat.messages, template_variables=plant("no JSON"))},
                "request id": {"text": "hi", "request_id": f"{plant('bad request id')} \n"},
                "stops": {"text": "hi", "sampling": SamplingParams(stop=[plant("stop")] * 1000)},
                "temperature": {"text": plant("refused text"), "sampling": SamplingParams(temperature=-1.0)},
                "long": {"text": plant("long text") * 3000},
            }
            for name, fields in refused.items():
                if name == "role":
                    await _either(generate(**fields))
                else:
                    with pytest.raises(grpc.aio.AioRpcError):
                        await generate(**fields)
            salted = GenerateRequest(
                model=MODEL, text=plant("salted text"), cache_salt=plant("cache salt"), sampling=sampled()
            )
            unknown = plant("unknown field").encode()
            salted.MergeFromString(b"\xfa\x7f" + bytes([len(unknown)]) + unknown)  # of field 2047
            await _either(_all(stub.Generate(salted, metadata=metadata, timeout=START_S)))
            raw: Any = channel.unary_stream("/trunkline.v1.InferenceService/Generate")
            await _either(_all(raw(plant("no protobuf").encode(), metadata=metadata, timeout=START_S)))
            tokenized = await stub.Tokenize(TokenizeRequest(model=MODEL, text=plant("tokenized")), metadata=metadata)
            await stub.Detokenize(DetokenizeRequest(model=MODEL, token_ids=tokenized.token_ids), metadata=metadata)
            keep("token ids", ", ".join(map(str, tokenized.token_ids[:12])))
            as_ids = GenerateRequest(model=MODEL, token_ids=TokenIds(ids=tokenized.token_ids), sampling=sampled())
            await _all(stub.Generate(as_ids, metadata=metadata, timeout=START_S))
            explained = ExplainRouteRequest(request=GenerateRequest(model=MODEL, text=plant("explained")))
            await fleet.ExplainRoute(explained, metadata=metadata)
            await _either(stub.Tokenize(TokenizeRequest(model=MODEL, text="x"), metadata=(*metadata, session[0])))
    async with Client(f"127.0.0.1:{rig.port}", api_key=rig.key.credential, model=MODEL, direct=True) as client:
        done = await client.complete(plant("direct prompt"), max_tokens=16, ignore_eos=True)
        keep("direct output", done.text)


async def over_http(rig: Rig) -> None:
    plant = rig.canaries.plant
    for credential in (rig.bearer, {"x-api-key": rig.token}):
        headers = {
            **credential,
            **{"x-request-id": REQUEST_ID, SESSION: plant("HTTP session"), "user-agent": plant("user agent")},
            **{"traceparent": plant("traceparent"), "baggage": f"a={plant('baggage')}", "cookie": plant("cookie")},
            "referer": f"http://{plant('referer')}/",
        }
        chat = [{"role": "user", "content": plant("HTTP chat")}]
        variables = {plant("HTTP variable"): plant("HTTP variable's value")}
        function = {"type": "function", "function": {"name": plant("tool")}}
        bodies: list[tuple[str, dict[str, Any]]] = [
            ("/v1/completions", {"prompt": plant("HTTP prompt"), "stop": [plant("HTTP stop")], "user": plant("user")}),
            ("/v1/completions", {"prompt": plant("HTTP streamed"), "stream": True, "echo": True, "logprobs": 1}),
            ("/v1/completions", {"prompt": plant("HTTP salted"), "cache_salt": plant("HTTP salt")}),
            ("/v1/completions", {"prompt": "x", plant("unknown name"): plant("unknown value")}),
            ("/v1/completions", {"prompt": {"text": plant("a prompt of a wrong type")}}),
            ("/v1/completions", {"prompt": plant("HTTP prompt of an unknown model"), "model": plant("HTTP model")}),
            ("/v1/completions", {"prompt": "x", "logit_bias": {plant("bias"): 1}}),
            ("/v1/completions", {"prompt": "x", "max_tokens": plant("a number that is a text")}),
            ("/v1/chat/completions", {"messages": chat, "chat_template_kwargs": variables}),
            ("/v1/chat/completions", {"messages": chat, "chat_template": plant("template"), "tools": [function]}),
            ("/v1/chat/completions", {"messages": [{"role": plant("HTTP role"), "content": plant("HTTP content")}]}),
            ("/v1/chat/completions", {"messages": chat, "n": 2, "metadata": {plant("metadata"): plant("its value")}}),
            ("/v1/messages", {"messages": chat, "system": plant("system"), "max_tokens": 4}),
            ("/v1/messages", {"messages": chat, "max_tokens": 4, "stop_sequences": [plant("sequence")]}),
            ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": plant("counted")}]}),
            ("/v1/responses", {"input": plant("input"), "instructions": plant("instructions"), "store": True}),
            ("/v1/responses", {"input": "x", "previous_response_id": plant("previous response")}),
            ("/tokenize", {"prompt": plant("HTTP tokenized")}),
            ("/detokenize", {"tokens": [plant("no token")]}),
        ]
        url = f"http://127.0.0.1:{rig.http_port}"
        async with httpx2.AsyncClient(base_url=url, timeout=START_S, trust_env=False, headers=headers) as http:
            for path, body in bodies:
                response = await http.post(path, json={"model": MODEL, **body})
                assert response.status_code in (200, 400, 403, 404), response.text
                if response.status_code == 200 and path == "/v1/completions" and not body.get("stream"):
                    text = response.json()["choices"][0]["text"]
                    if len(text) >= 12:
                        rig.canaries.keep("HTTP output", text)
            for broken in (f'{{"prompt": "{plant("cut off")}', f"[{plant('no JSON at all')}]", '{"a": ' * 200):
                sent = await http.post("/v1/completions", content=broken, headers={"content-type": "application/json"})
                assert sent.status_code == 400
            other_type = {"content-type": plant("type")}
            await http.post("/v1/completions", content=plant("of another type"), headers=other_type)
            for path in ("/v1/models/", "/v1/responses/", "/", "/v1/completions?key="):
                await http.get(path + plant("path"))
            await http.delete(f"/v1/responses/{plant('deleted')}")


async def with_tools(rig: Rig) -> None:
    """Conversations with a model that calls a tool, and refused ones. A refusal says nothing of them but the names of
    fields."""
    talk, refusals = ToolTalk.planted(rig.canaries, rig.question), list[str]()
    for direct in (False, True):
        async with Client(
            f"127.0.0.1:{rig.port}", api_key=rig.key.credential, model=PLAYER, direct=direct, timeout_s=START_S
        ) as client:
            done = await client.complete(talk.messages(), tools=[talk.tool])
            assert done.reasoning
            assert done.tool_calls
            for messages, tool in talk.refused_calls():
                with pytest.raises(InvalidRequest) as error:
                    await client.complete(messages, tools=[tool])
                refusals.append(f"{error.value.field} {error.value}")
    async with httpx2.AsyncClient(timeout=START_S, trust_env=False, headers=rig.bearer) as http:
        for status, path, body in (*talk.of_chat(), *talk.of_messages(), *talk.of_responses()):
            answer = await http.post(f"http://127.0.0.1:{rig.http_port}{path}", json={"model": PLAYER, **body})
            assert answer.status_code == status, answer.text
            if status == 400:
                refusals.append(answer.text)
            else:
                assert "calledtool" in answer.text
    assert not rig.canaries.found("\n".join(refusals))


async def with_wrong_credentials(rig: Rig) -> None:
    plant, known = rig.canaries.plant, rig.key.key_id
    forged = issuer.token(issuer.claims(sub=plant("forged subject"), exp=time.time() + 60), kind="ed25519-other")
    rig.canaries.keep("forged claims", forged.split(".")[1])
    rig.canaries.keep("forged signature", forged.split(".")[2])
    wrong = [
        *(f"Bearer {rig.wrong_key.credential}", f"Bearer tl-{known}-{rig.wrong_key.secret}"),
        *(f"Bearer {forged}", f"Bearer a.{plant('no token at all')}.c", f"Bearer {plant('no key')}"),
        *(f"Basic {plant('basic')}", plant("no scheme"), f"Bearer {plant('many')} {plant('words')}"),
    ]
    url = f"http://127.0.0.1:{rig.http_port}"
    async with (
        grpc.aio.insecure_channel(f"127.0.0.1:{rig.port}") as channel,
        httpx2.AsyncClient(base_url=url, timeout=START_S, trust_env=False) as http,
    ):
        stub: Any = InferenceServiceStub(channel)
        for given in wrong:
            metadata = (("authorization", given), ("x-trunkline-tenant", plant("tenant").lower()))
            with pytest.raises(grpc.aio.AioRpcError):
                await _all(stub.Generate(GenerateRequest(text=plant("unauthenticated")), metadata=metadata))
            for headers in ({"authorization": given}, {"x-api-key": given}):
                response = await http.post("/v1/completions", json={"prompt": plant("refused")}, headers=headers)
                assert response.status_code == 401
        for named in (plant("named tenant"), f"{plant('long tenant')}{'x' * 200}"):
            acting = (*rig.bearer.items(), ("x-trunkline-tenant", named))
            with pytest.raises(grpc.aio.AioRpcError):
                await _all(stub.Generate(GenerateRequest(text="x"), metadata=acting))
            response = await http.get("/v1/models", headers={**rig.bearer, "x-trunkline-tenant": named})
            assert response.status_code in (400, 403)


def over_sockets(rig: Rig) -> None:
    """What is not HTTP at all, and heads that are refused before a path is known."""
    plant = rig.canaries.plant
    for raw in (
        plant("no HTTP"),
        f"GET /{plant('raw path')} HTTP/9.9\r\n\r\n",
        f"POST /v1/completions HTTP/1.1\r\nhost: x\r\n{plant('bad header')}\r\n\r\n",
        f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: {plant('huge header') * 5000}\r\n\r\n",
        f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {plant('length')}\r\n\r\n",
        f"{plant('method')} / HTTP/1.1\r\nhost: x\r\n\r\n",
    ):
        for port in (rig.http_port, rig.port):
            connected = socket.create_connection(("127.0.0.1", port), timeout=START_S)
            with connected as connection, suppress(OSError):  # the server may have closed it already
                connection.sendall(raw.encode())
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(1 << 16):
                    pass


async def a_lost_worker(rig: Rig) -> None:
    """A request whose worker is killed under it, and that finds no other one."""
    _, worker, _ = rig.processes
    prompt = rig.canaries.plant("prompt of a lost worker")
    address, key = f"127.0.0.1:{rig.port}", rig.key.credential
    async with Client(address, api_key=key, model=MODEL, retries=0, timeout_s=5.0) as client:

        async def lose() -> None:
            async for _ in client.generate(prompt, max_tokens=900, ignore_eos=True):
                worker.popen.kill()

        with pytest.raises(TrunklineError):
            await lose()


def exported(rig: Rig) -> dict[str, str | bytes]:
    wait_until(lambda: REQUEST_ID in rig.collector.text("spans"), "spans come", TELEMETRY_S)
    # Worker and router both export: whose metrics come first is not known.
    wait_until(lambda: OF_ROUTER in rig.collector.text("metrics"), "the router's metrics come", TELEMETRY_S)
    return {"spans": rig.collector.text("spans"), "metrics": rig.collector.text("metrics")}


def contents(client: Any) -> str:
    """Every key of Redis with its value."""
    readers = {
        **{b"string": client.get, b"hash": client.hgetall, b"set": client.smembers},
        b"zset": lambda key: client.zrange(key, 0, -1, withscores=True),
        b"list": lambda key: client.lrange(key, 0, -1),
    }
    found = [f"{key!r} {readers[client.type(key)](key)!r}" for key in client.scan_iter()]
    client.close()
    return "\n".join(found)


async def _all(call: Any) -> list[Any]:
    return [response async for response in call]


def _called(tool: str, arguments: str, result: str) -> ChatMessages:
    call, returned = ToolCall(name=tool, arguments=arguments), ToolResult(name=tool, content=result)
    return ChatMessages(
        messages=[
            ChatMessage(role="assistant", parts=[ChatPart(tool_call=call)]),
            ChatMessage(role="tool", parts=[ChatPart(tool_result=returned)]),
        ]
    )


async def _either(call: Any) -> None:
    """Whether the server answers or refuses it is another test's concern."""
    with suppress(grpc.aio.AioRpcError):
        await call
