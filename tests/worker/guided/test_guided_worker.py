"""Grammars in a real worker: its front, its engine, and the processes that compile and match."""

import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tests.cluster.processes import Worker, children, descendants
from tests.worker.engine_rig import DEMO_MODEL
from tests.worker.guided.guided_rig import CODE, FIXED, OBJECT, PERSON, REGEX, TOKENIZER, WORDS, grammar, is_valid
from trunkline.status import DEADLINE_EXCEEDED, INVALID_REQUEST, OVERLOADED
from trunkline.v1.generation_pb2 import FinishReason, SamplingParams
from trunkline.v1.worker_pb2 import (
    Capability,
    GetModelRequest,
    Grammar,
    SessionRequest,
    Submit,
    Work,
    WorkerServiceGenerateRequest,
)
from trunkline_bench.servers.ports import free_port

PROMPT = TOKENIZER.encode("Once upon a time").ids
GRAMMARS = [PERSON, FIXED, CODE, OBJECT, WORDS]
BAD = grammar(REGEX, "(")
METRICS_PORT = free_port()
STOP, LENGTH = FinishReason.FINISH_REASON_STOP, FinishReason.FINISH_REASON_LENGTH


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    worker = Worker(
        DEMO_MODEL, "--dtype=float32", "--deterministic", "--kv-blocks=256", f"--metrics-port={METRICS_PORT}"
    )
    try:
        yield worker.wait_ready()
    finally:
        worker.stop()


def submit_of(handle: int, constraint: Grammar) -> Submit:
    params = SamplingParams(seed=handle, temperature=handle % 3 / 2, max_tokens=80)
    return Submit(handle=handle, prompt_token_ids=PROMPT, sampling=params, work=Work(grammar=constraint))


def run(
    worker: Worker, submits: list[Submit], at_output: Callable[[int], None] = lambda number: None
) -> dict[int, tuple[str, Any]]:
    """What a session's submits get: the text, and how it ends: a finish reason, or what an error says."""
    texts, ends = {submit.handle: "" for submit in submits}, dict[int, Any]()
    done = threading.Event()

    def requests() -> Iterator[SessionRequest]:
        yield SessionRequest(grammars=[*GRAMMARS, BAD])
        yield SessionRequest(submits=submits)
        done.wait()

    number = 0
    call = worker.stub.Session(requests())
    for output in (output for response in call for output in response.outputs):
        at_output(number := number + 1)
        texts[output.handle] += output.chunk.text
        if output.HasField("error"):
            ends[output.handle] = output.error.reason, output.error.field, output.error.message
        elif output.chunk.finish_reason:
            ends[output.handle] = output.chunk.finish_reason
        if len(ends) == len(texts):
            break
    done.set()
    call.cancel()
    return {handle: (text, ends[handle]) for handle, text in texts.items()}


def by_digest(handle: int) -> Submit:
    return submit_of(handle, Grammar(digest=GRAMMARS[handle % 5].digest))


def check(found: dict[int, tuple[str, Any]]) -> None:
    for handle, (text, end) in found.items():
        assert end in (STOP, LENGTH)
        assert end == LENGTH or is_valid(GRAMMARS[handle % 5], text)


def test_a_worker_says_that_it_takes_grammars(worker: Worker) -> None:
    model = worker.stub.GetModel(GetModelRequest())
    assert list(model.capabilities) == [Capability.CAPABILITY_GRAMMARS]
    assert model.max_session_grammar_bytes >= 1 << 20


def test_outputs_of_a_session_are_of_their_grammars(worker: Worker) -> None:
    found = run(worker, [*map(by_digest, range(1, 25)), submit_of(99, Grammar(digest=BAD.digest))])
    assert found.pop(99)[1][:2] == (INVALID_REQUEST, "grammar")
    check(found)
    assert sum(end == STOP for _, end in found.values()) > 10


def test_the_end_of_a_grammar_ends_the_choice_whatever_the_parameters_say(worker: Worker) -> None:
    asked = submit_of(1, Grammar(digest=FIXED.digest))
    asked.sampling.ignore_eos, asked.sampling.min_tokens, asked.sampling.keep_special_tokens = True, 80, True
    ((text, end),) = run(worker, [asked]).values()
    assert end == STOP
    assert is_valid(FIXED, text)


def test_a_direct_client_brings_its_grammar(worker: Worker) -> None:
    responses = worker.stub.Generate(WorkerServiceGenerateRequest(submit=submit_of(1, PERSON)))
    assert is_valid(PERSON, "".join(response.chunk.text for response in responses))


@pytest.mark.parametrize("victim", ["grammar process", "matching process"])
def test_outputs_continue_unchanged_if_these_processes_are_killed(worker: Worker, victim: str) -> None:
    submits = [by_digest(handle) for handle in range(1, 25)]
    expected = run(worker, submits)
    (grammar_pid,) = children(worker.engine_pid())
    (matching_pid,) = children(grammar_pid)

    def kill(number: int) -> None:
        if number == 100:
            os.kill(matching_pid if victim == "matching process" else grammar_pid, signal.SIGKILL)

    found = run(worker, submits, kill)
    check(expected)
    changed = [end for handle, (_, end) in found.items() if (found[handle] != expected[handle])]
    if victim == "matching process" and changed:  # just then, it worked on one sequence alone: that one is blamed
        assert changed == [("INVALID_REQUEST", "grammar", "grammar: matching the output broke off")]
    else:
        assert not changed


def test_no_request_waits_longer_than_its_deadline_for_processes_that_are_stopped(worker: Worker) -> None:
    run(worker, [by_digest(1)])
    (grammar_pid,) = children(worker.engine_pid())
    stopped = descendants(grammar_pid)
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    submits = [by_digest(1), submit_of(99, Grammar(digest=BAD.digest))]  # to match, and to compile
    for submit in submits:
        submit.timeout.FromMilliseconds(500)
    found = run(worker, submits)
    for pid in stopped:
        os.kill(pid, signal.SIGCONT)
    # OVERLOADED: shortly before its deadline, a request that cannot meet it any more is refused.
    assert len(found) == 2
    assert {end[0] for _, end in found.values()} <= {DEADLINE_EXCEEDED, OVERLOADED}
    check(run(worker, [by_digest(1)]))


def test_metrics_count_grammars_by_outcome_and_lost_processes(worker: Worker) -> None:
    run(worker, [by_digest(1), submit_of(99, Grammar(digest=BAD.digest))])
    (grammar_pid,) = children(worker.engine_pid())
    os.kill(grammar_pid, signal.SIGKILL)
    run(worker, [by_digest(1)])
    text = httpx.get(f"http://127.0.0.1:{METRICS_PORT}/metrics").text
    for name in ("grammar_compile_seconds_count", "lost_grammar_processes_total"):
        assert re.search(rf"^trunkline_worker_{name}{{.*}} [1-9]", text, re.MULTILINE), text
    assert {*re.findall(r'grammar_compile_seconds_count{.*outcome="(\w+)"', text)} == {"compiled", INVALID_REQUEST}
