"""A worker process that serves vectors or scores, over gRPC: sessions, direct calls, refusals and statistics."""

import threading
import urllib.request
from collections.abc import Generator
from pathlib import Path
from struct import unpack
from typing import Any

import pytest
import torch

from tests.cluster.processes import Worker
from tests.worker.pooled.checkpoints import write_model, write_modules, write_tokenizer
from tests.worker.pooled.pooled_rig import PooledEngine, prompts_of
from trunkline.status import INVALID_REQUEST
from trunkline.v1.generation_pb2 import SamplingParams
from trunkline.v1.worker_pb2 import (
    Capability,
    GetModelRequest,
    GetStatsRequest,
    OutputKind,
    SequenceOutput,
    SessionRequest,
    Submit,
    Task,
    Work,
    WorkerServiceGenerateRequest,
)
from trunkline_bench.servers.ports import free_port

METRICS_PORT = free_port()
NO_TOKENS = SamplingParams(seed=1, max_tokens=0)
VECTOR, SCORE = OutputKind.OUTPUT_KIND_VECTOR, OutputKind.OUTPUT_KIND_SCORE


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bert")
    write_model(folder, "bert", "Model")
    write_modules(folder, pooling="pooling_mode_mean_tokens", sentence_bert_config={"max_seq_length": 200})
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def worker(bert: Path) -> Generator[Worker, None, None]:
    worker = Worker(bert, f"--metrics-port={METRICS_PORT}", "--stats-interval-s=0.1")
    try:
        yield worker.wait_ready()
    finally:
        worker.stop()


def answers(worker: Worker, submits: list[Submit]) -> dict[int, SequenceOutput]:
    """The one output of each submit of a session, by handle."""
    done = threading.Event()

    def requests() -> Generator[SessionRequest, None, None]:
        yield SessionRequest(submits=submits)
        done.wait()

    found: dict[int, SequenceOutput] = {}
    call: Any = worker.stub.Session(requests(), timeout=60)
    for output in (output for response in call for output in response.outputs):
        assert output.handle not in found
        found[output.handle] = output
        if len(found) == len(submits):
            break
    done.set()
    call.cancel()
    return found


def vector_of(output: Any) -> torch.Tensor:
    return torch.tensor(unpack(f"<{len(output.vector.values) // 4}f", output.vector.values))


def submit(handle: int, prompt: list[int], kind: "OutputKind.ValueType" = VECTOR, **work: Any) -> Submit:
    return Submit(handle=handle, prompt_token_ids=prompt, sampling=NO_TOKENS, work=Work(output=kind, **work))


def test_the_worker_tells_what_its_model_is_for(worker: Worker) -> None:
    model = worker.stub.GetModel(GetModelRequest())
    assert (model.task, list(model.capabilities)) == (Task.TASK_EMBED, [Capability.CAPABILITY_VECTORS])
    assert (model.pooling.dimensions, model.context_length, model.architecture) == (48, 200, "BertModel")
    assert model.itl_target_ms == 500.0


def test_a_session_gets_the_vectors_of_mixed_texts_and_refusals_of_others(bert: Path, worker: Worker) -> None:
    prompts = prompts_of([1, 200, 7, 90, 3, 150] * 20)
    bad = {
        1001: (Submit(handle=1001, prompt_token_ids=[5], sampling=SamplingParams(seed=1, max_tokens=3)), "model"),
        1002: (submit(1002, [5], SCORE), "model"),
        1003: (submit(1003, [5], dimensions=7), "dimensions"),
        1004: (submit(1004, []), "prompt_token_ids"),
        1005: (submit(1005, [5] * 201), "prompt"),
    }
    good = [submit(handle, prompt) for handle, prompt in enumerate(prompts, start=1)]
    found = answers(worker, [*good, *(refused for refused, _ in bad.values())])
    for handle, (_, field) in bad.items():
        assert found[handle].error.field == field
        if handle != 1005:
            assert found[handle].error.reason == INVALID_REQUEST
    expected = PooledEngine(bert, threads=1).outputs(prompts)
    for request, vector in zip(good, expected, strict=True):
        output = found[request.handle]
        assert torch.allclose(vector_of(output), vector, atol=1e-6, rtol=0)
        assert output.prompt.prompt_tokens == len(request.prompt_token_ids)
        assert not output.timeline.decode_steps


def test_a_direct_client_gets_a_vector(worker: Worker) -> None:
    request = WorkerServiceGenerateRequest(submit=submit(1, [5, 6, 7]))
    (response,) = worker.stub.Generate(request, timeout=60)
    assert vector_of(response).norm() == pytest.approx(1.0, abs=1e-6)


def test_requests_without_output_tokens_count_as_requests(worker: Worker) -> None:
    before = worker.stub.GetStats(GetStatsRequest()).lanes
    answers(worker, [submit(handle, [5, 6, 7]) for handle in range(1, 11)])
    stats = worker.stub.GetStats(GetStatsRequest())
    assert sum(lane.finished for lane in stats.lanes) - sum(lane.finished for lane in before) == 10
    assert not any(lane.output_tokens or lane.tpot_s.count for lane in stats.lanes)
    assert stats.steps.padding_tokens == 0
    with urllib.request.urlopen(f"http://127.0.0.1:{METRICS_PORT}/metrics", timeout=60) as page:
        text = page.read().decode()
    assert "NaN" not in text


def test_a_reranker_scores_pairs(tmp_path: Path) -> None:
    write_model(tmp_path, "xlm-roberta", "ForSequenceClassification", num_labels=1)
    write_tokenizer(tmp_path)
    prompts = prompts_of([12, 150, 40])
    expected = PooledEngine(tmp_path).outputs(prompts)
    worker = Worker(tmp_path)
    try:
        worker.wait_ready()
        found = answers(worker, [submit(handle, prompt, SCORE) for handle, prompt in enumerate(prompts)])
        for handle, scores in enumerate(expected):
            assert list(found[handle].score.values) == pytest.approx(scores.tolist(), abs=1e-6)
    finally:
        worker.stop()
