"""Grammars that are made to do harm, over HTTP: each is answered in time, and other requests go on as if alone."""

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from random import Random
from threading import Event
from typing import Any

import httpx
import pytest
from llguidance import LLTokenizer

from tests.cluster.processes import Process, Worker, alive, children, descendants, resident_bytes, script
from tests.worker.engine_rig import DEMO_MODEL, make_submit
from tests.worker.grammar.byte_matcher import accepts, matcher_of
from tests.worker.guided.guided_rig import PERSON, guided
from trunkline.v1.worker_pb2 import WorkerServiceGenerateRequest
from trunkline_bench.attacks.vectors.hostile_grammars import CLASSES, Hostile, structured_outputs
from trunkline_bench.servers.ports import free_port

OF_EACH_CLASS, NEIGHBOURS = 10, 8
ANSWER_S = 2.0
BUSY = 6  # times as long: two workers, the streams of their neighbours and other tests share few cores
TIMEOUT_S = 60.0
MOST_GROWTH_BYTES, MOST_GROWTH_OF_ALL_BYTES = 64 << 20, 1 << 30  # of one process that lasts, and of all processes
MODEL = "tales"
TOKENIZER = LLTokenizer(str(DEMO_MODEL / "tokenizer.json"))
HOT = {"model": MODEL, "prompt": "Once upon a time", "temperature": 1.5, "return_token_ids": True}


@dataclass(frozen=True, slots=True)
class Edge:
    """A router before two workers, and the streams that they give when there is no other request."""

    client: httpx.Client
    processes: list[Process]
    lasting: dict[int, int]  # memory in bytes of each process that must last: all but those that compile and match
    expected: list[dict[str, Any]]  # choices

    def memory_bytes(self) -> int:
        """What all processes take."""
        pids = {pid for process in self.processes for pid in descendants(process.popen.pid)}
        return sum(map(resident_bytes, pids))

    def neighbour(self, number: int) -> dict[str, Any]:
        """The whole of a stream without a grammar."""
        asked = HOT | {"max_tokens": 200, "seed": number, "ignore_eos": True, "stream": True}
        made: dict[str, Any] = {"text": "", "token_ids": [], "finish_reason": None}
        with self.client.stream("POST", "/completions", json=asked) as response:
            response.raise_for_status()
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                    made["text"] += choice["text"]
                    made["token_ids"] += choice.get("token_ids") or []
                    made["finish_reason"] = choice["finish_reason"]
        assert (len(made["token_ids"]), made["finish_reason"]) == (200, "length")
        return made


@pytest.fixture(scope="module")
def edge() -> Iterator[Edge]:
    with ExitStack() as stack:
        workers = [
            Worker(DEMO_MODEL, "--dtype=float32", "--deterministic", "--kv-blocks=1024", f"--served-model-name={MODEL}")
            for _ in range(2)
        ]
        for worker in workers:
            stack.callback(worker.stop)
        for worker in workers:
            worker.wait_ready()
        http_port, addresses = free_port(), ",".join(worker.address for worker in workers)
        router = Process(script("trunkline-router"), f"--workers={addresses}", "--port=0", f"--http-port={http_port}")
        stack.callback(router.stop)
        router.wait_for("router listening")
        client = stack.enter_context(httpx.Client(base_url=f"http://127.0.0.1:{http_port}/v1", timeout=TIMEOUT_S))
        processes = [router, *(worker.process for worker in workers)]
        edge = Edge(client, processes, {}, [])
        edge.expected.extend(map(edge.neighbour, range(NEIGHBOURS)))
        lasting = descendants(router.popen.pid)
        for worker in workers:
            submit = guided(make_submit(1, [5, 6, 7], max_tokens=4), PERSON)
            assert [*worker.stub.Generate(WorkerServiceGenerateRequest(submit=submit))]
            engine = worker.engine_pid()
            (grammar_process,) = children(engine)
            lasting |= {worker.process.popen.pid, engine, grammar_process}
        edge.lasting.update((pid, resident_bytes(pid)) for pid in lasting)
        yield edge


def body(number: int, kind: int, text: str) -> dict[str, Any]:
    return HOT | {"max_tokens": 4, "seed": number, "structured_outputs": structured_outputs(kind, text)}


def check(answer: httpx.Response, kind: int, text: str) -> None:
    """Asserts that it is a refusal with a reason, or of the grammar, or begins like that."""
    if answer.status_code != httpx.codes.OK:
        assert 400 <= answer.status_code < 500, answer.text
        assert answer.json()["error"]["message"]
        return
    (choice,) = answer.json()["choices"]
    if choice["finish_reason"] == "stop":
        assert accepts(matcher_of(kind, text), choice["text"]), choice
    else:
        begun = TOKENIZER.decode_bytes(choice["token_ids"])
        assert matcher_of(kind, text).try_consume_tokens(list(begun)) == len(begun), choice


@pytest.mark.slow
@pytest.mark.parametrize("make", CLASSES, ids=lambda make: make.__name__)
def test_hostile_grammars_are_answered_and_other_requests_go_on(edge: Edge, make: Callable[[Random], Hostile]) -> None:
    done = Event()
    before = edge.memory_bytes()

    def neighbour(number: int) -> int:
        """Streams again and again. Returns how often."""
        rounds = 0
        while not (done.is_set() and rounds):
            assert edge.neighbour(number) == edge.expected[number]
            rounds += 1
        return rounds

    with ThreadPoolExecutor(NEIGHBOURS) as pool:
        streaming = [pool.submit(neighbour, number) for number in range(NEIGHBOURS)]
        try:
            for number in range(OF_EACH_CLASS):
                kind, text = make(Random(number))
                begun_s = time.monotonic()
                answer = edge.client.post("/completions", json=body(number, kind, text))
                took_s = time.monotonic() - begun_s

                assert took_s < BUSY * ANSWER_S, (number, answer.text[:200])
                check(answer, kind, text)
        finally:
            done.set()
        assert all(one.result() for one in streaming)
    assert alive({*edge.lasting}) == {*edge.lasting}
    assert max(resident_bytes(pid) - bytes_before for pid, bytes_before in edge.lasting.items()) < MOST_GROWTH_BYTES
    assert edge.memory_bytes() - before < MOST_GROWTH_OF_ALL_BYTES
