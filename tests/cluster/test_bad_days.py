"""Bad days: processes that die, drain, or cannot start."""

import os
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from grpc_health.v1 import health_pb2
from grpc_status.rpc_status import from_call

from tests.cluster.processes import Cluster, Process, Worker, alive, script, stop_still, wait_until
from tests.worker.engine_rig import DEMO_MODEL
from trunkline.v1.generation_pb2 import SamplingParams
from trunkline.v1.worker_pb2 import (
    DrainRequest,
    Resume,
    SessionHello,
    SessionRequest,
    Submit,
    UndrainRequest,
    WorkerServiceGenerateRequest,
)
from trunkline_bench.servers.ports import free_port
from trunkline_runtime.server import hold_port
from trunkline_runtime.settings import load_settings
from trunkline_worker.front_settings import WorkerSettings

PROMPT = list(range(60, 90))


def submit_of(prompt: list[int] = PROMPT, **sampling: Any) -> Submit:
    return Submit(
        prompt_token_ids=prompt,
        sampling=SamplingParams(**{"seed": 3, "temperature": 0.8, "ignore_eos": True, **sampling}),
    )


def generate(worker: Worker, submit: Submit, **options: Any) -> Any:
    return worker.stub.Generate(WorkerServiceGenerateRequest(submit=submit), **options)


def reason_of(error: grpc.RpcError) -> str:
    status = from_call(cast("grpc.Call", error))  # which an error of a call is, too
    assert status is not None
    info = ErrorInfo()
    assert any(detail.Unpack(info) for detail in status.details)
    reason: str = info.reason
    return reason


@contextmanager
def standing_still(pid: int) -> Iterator[None]:
    """A process computes nothing meanwhile, so that its streams last."""
    stop_still(pid)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.fixture
def worker() -> Any:
    """One that does not outlive the test. Where a test harms nobody, a worker of `cluster` does."""
    started = Worker(DEMO_MODEL, "--dtype=float32", "--deterministic", "--kv-blocks=128").wait_ready()
    yield started
    started.stop()


def test_pitfall_13_a_dead_engine_ends_streams_at_once_turns_health_and_frees_the_port(worker: Worker) -> None:
    call = generate(worker, submit_of(max_tokens=900), timeout=60)
    next(call)
    os.kill(worker.engine_pid(), signal.SIGKILL)
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert reason_of(caught.value) == "NO_WORKER"
    assert any(detail.Is(RetryInfo.DESCRIPTOR) for detail in from_call(cast("grpc.Call", caught.value)).details)
    assert worker.process.wait() == 1
    with hold_port("127.0.0.1", worker.port) as free:
        assert free.getsockname()[1] == worker.port


def test_an_engine_ends_when_its_front_is_killed(worker: Worker) -> None:
    engine = worker.engine_pid()
    worker.process.popen.kill()
    wait_until(lambda: not alive({engine}), "the engine ends", timeout_s=60)


def test_drain_finishes_what_runs_and_admits_nothing_more(worker: Worker) -> None:
    call = generate(worker, submit_of(max_tokens=900), timeout=60)
    next(call)
    drained: list[Any] = []
    draining = threading.Thread(target=lambda: drained.append(worker.stub.Drain(DrainRequest(), timeout=60)))
    with standing_still(worker.engine_pid()):
        draining.start()
        wait_until(lambda: worker.health("readiness") == health_pb2.HealthCheckResponse.NOT_SERVING, "not ready")
        assert worker.health("liveness") == health_pb2.HealthCheckResponse.SERVING
        assert worker.load().draining
        with pytest.raises(grpc.RpcError) as caught:
            list(generate(worker, submit_of(max_tokens=1)))
        assert reason_of(caught.value) == "NO_WORKER"
    assert sum(len(response.chunk.token_ids) for response in call) == 899
    draining.join()
    assert (drained[0].finished, drained[0].aborted) == (1, 0)


@pytest.mark.slow
def test_a_drain_that_runs_out_of_time_cuts_off_with_unavailable(worker: Worker) -> None:
    call = generate(worker, submit_of(max_tokens=900), timeout=60)
    next(call)
    request = DrainRequest()
    request.timeout.FromMilliseconds(50)
    with standing_still(worker.engine_pid()):
        answer = worker.stub.Drain(request, timeout=60)
    assert (answer.finished, answer.aborted) == (0, 1)
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    assert reason_of(caught.value) == "NO_WORKER"
    assert worker.stub.Drain(request, timeout=60).aborted == 0, "draining again is harmless"


def test_a_ready_worker_tells_its_empty_blocks_before_its_first_step(worker: Worker) -> None:
    load = worker.load()
    assert (load.kv_free_blocks, load.kv_live_blocks, load.kv_cached_blocks) == (128, 0, 0)


@pytest.mark.slow
def test_an_undrained_worker_serves_again_but_not_one_that_was_told_to_stop(worker: Worker) -> None:
    call = generate(worker, submit_of(max_tokens=900), timeout=60)
    next(call)
    drained: list[Any] = []
    draining = threading.Thread(target=lambda: drained.append(worker.stub.Drain(DrainRequest(), timeout=60)))
    with standing_still(worker.engine_pid()):
        draining.start()
        wait_until(lambda: worker.health("readiness") == health_pb2.HealthCheckResponse.NOT_SERVING, "not ready")
        worker.stub.Undrain(UndrainRequest(), timeout=60)
        draining.join()
        assert (drained[0].finished, drained[0].aborted) == (0, 0)
        assert worker.health("readiness") == health_pb2.HealthCheckResponse.SERVING
        assert not worker.load().draining
    assert list(generate(worker, submit_of(max_tokens=1), timeout=60))
    call.cancel()
    call = generate(worker, submit_of(max_tokens=900), timeout=60)
    next(call)
    with standing_still(worker.engine_pid()):
        worker.process.popen.send_signal(signal.SIGTERM)
        wait_until(lambda: worker.health("readiness") == health_pb2.HealthCheckResponse.NOT_SERVING, "stopping")
        with pytest.raises(grpc.RpcError, match="this worker is stopping") as caught:
            worker.stub.Undrain(UndrainRequest(), timeout=60)
    assert reason_of(caught.value) == "NO_WORKER"
    call.cancel()
    assert worker.process.wait() == 0


@pytest.mark.slow
def test_a_ledger_from_another_worker_goes_on_exactly(cluster: Cluster) -> None:
    worker, other = cluster.workers
    submit = submit_of(max_tokens=24, logprobs=0)
    whole = list(generate(worker, submit))
    tokens = [token for response in whole for token in response.chunk.token_ids]
    text = "".join(response.chunk.text for response in whole)
    logprobs = [entry.chosen.logprob for response in whole for entry in response.chunk.logprobs]
    for cut in (0, 1, 7, 16, 23, 24):
        resumed = Submit()
        resumed.CopyFrom(submit)
        resumed.resume.CopyFrom(Resume(output_token_ids=tokens[:cut], text_bytes_sent=0))
        rest = list(generate(other, resumed))
        assert tokens[:cut] + [token for response in rest for token in response.chunk.token_ids] == tokens
        assert "".join(response.chunk.text for response in rest) == text
        assert logprobs[:cut] + [e.chosen.logprob for r in rest for e in r.chunk.logprobs] == logprobs
        assert rest[0].chunk.first_token_index == cut


def test_a_session_that_ends_aborts_its_requests_and_refusals_disturb_nobody(cluster: Cluster) -> None:
    worker = cluster.workers[0]
    end = threading.Event()
    first, second, bad, twin = submit_of(max_tokens=900), submit_of(max_tokens=5), submit_of(prompt=[-1]), submit_of()
    for handle, submit in ((1, first), (2, second), (3, bad), (1, twin)):
        submit.handle = handle

    def requests() -> Any:
        yield SessionRequest(hello=SessionHello(router_id="test"), submits=[first, second, bad])
        yield SessionRequest(submits=[twin])
        end.wait(30)

    call = worker.stub.Session(requests(), timeout=60)
    assert next(call).welcome.epoch
    errors: dict[int, str] = {}
    tokens = dict.fromkeys((1, 2), 0)
    for response in call:
        for output in response.outputs:
            if output.HasField("error"):
                errors[output.handle] = output.error.field
            else:
                tokens[output.handle] += len(output.chunk.token_ids)
        if tokens[2] == 5 and len(errors) == 2 and tokens[1] > 5:
            break
    assert errors == {3: "prompt_token_ids", 1: "handle"}
    call.cancel()
    end.set()
    wait_until(lambda: worker.load().kv_live_blocks == 0, "no live blocks")


def test_a_session_whose_reader_is_slow_gets_everything_in_fewer_messages(cluster: Cluster) -> None:
    worker = cluster.workers[0]
    end = threading.Event()
    submit = submit_of(max_tokens=200)
    submit.handle = 1

    def requests() -> Any:
        yield SessionRequest(submits=[submit])
        end.wait(60)

    call = worker.stub.Session(requests(), timeout=60)
    next(call)
    # While this side does not read, another request shows that the worker is not held back.
    assert sum(len(response.chunk.token_ids) for response in generate(worker, submit_of(max_tokens=25))) == 25
    indices: list[int] = []
    for response in call:
        for output in response.outputs:
            indices += range(
                output.chunk.first_token_index, output.chunk.first_token_index + len(output.chunk.token_ids)
            )
        if len(indices) == 200:
            break
    assert indices == list(range(200)), "in order, none lost, none twice"
    call.cancel()
    end.set()


def ended(*processes: Process) -> list[str]:
    """The last line of each: why it could not start."""
    for process in processes:
        assert process.wait(60) == 2
        assert "Traceback" not in "\n".join(process.lines)
        process.stop()
    return [process.lines[-1] for process in processes]


def test_a_worker_that_cannot_start_says_why_in_one_line(tmp_path: Path) -> None:
    missing = ["tokenizer.json", "config.json", "model.safetensors"]
    for removed in missing:
        shutil.copytree(DEMO_MODEL, tmp_path / removed)
        (tmp_path / removed / removed).unlink()
    said = ended(*(starting(f"--model={tmp_path / removed}") for removed in missing))
    for line, removed in zip(said, missing, strict=True):
        assert line.startswith("trunkline-worker: ")
        assert f"{removed}" in line.removeprefix("trunkline-worker: ").replace(str(tmp_path / removed), "")


def starting(*arguments: str) -> Process:
    return Process(script("trunkline-worker"), f"--port={free_port()}", "--threads=1", *arguments)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--port=99999"], "--port=99999 is out of range; allowed: 0 to 65535"),
        (["--dtype=float8"], "--dtype=float8 is out of range; allowed: auto, float32, bfloat16, float16"),
        (["--kv-blocks=few"], "--kv-blocks=few is not a whole number; allowed: 1 to 2147483646"),
        (["--kv-bloks=1"], "unrecognized arguments: --kv-bloks=1"),
        (["--kv-memory-fraction=2"], "allowed: 0.01 to 0.95"),
    ],
)
def test_a_setting_that_makes_no_sense_is_named(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        load_settings(WorkerSettings, [f"--model={DEMO_MODEL}", *arguments], prog="trunkline-worker")
    assert caught.value.code == 2
    told = capsys.readouterr().err
    assert told.startswith("trunkline-worker: ")
    assert told.count("\n") == 1
    assert said in told


@pytest.mark.slow
def test_a_setting_that_the_model_or_the_machine_does_not_allow_is_named() -> None:
    """The first is found by the process itself, and the others by its engine."""
    asked = ["--port=99999", "--context-length=5000", "--device=cuda"]
    said = ended(*(starting(f"--model={DEMO_MODEL}", argument) for argument in asked))
    assert "allowed: 0 to 65535" in said[0]
    assert "more than the model's 1024" in said[1]
    assert "no usable NVIDIA GPU" in said[2]


def test_a_taken_port_is_one_line_before_the_model_is_loaded(cluster: Cluster) -> None:
    port = cluster.workers[0].port
    process = Process(script("trunkline-worker"), f"--model={DEMO_MODEL}", f"--port={port}")
    assert process.wait(30) == 2
    assert f"port {port} on 127.0.0.1 is in use" in process.lines[-1]
    assert not any("engine starting" in line for line in process.lines)
    process.stop()
