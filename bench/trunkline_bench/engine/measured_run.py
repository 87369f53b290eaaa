"""One measured run in a process of its own: the engine, transformers' static batching or vLLM, over one workload.

against_transformers.py and cpu_model.py start it. It reads a JSON job from standard input and writes a JSON result to
standard output.
"""

import json
import resource
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from trunkline_bench.engine.workload import BenchRequest

READ_BYTES = 1 << 30  # far more than any cache
READS = 5


@dataclass(frozen=True, slots=True)
class Job:
    """A run."""

    runner: str  # of RUNNERS
    model: str
    dtype: str
    threads: int
    concurrency: int  # requests at once: in flight for the engine and vLLM, batch size for transformers
    requests: list[BenchRequest]
    quantization: str = "none"  # of the engine
    reads_memory: bool = False  # whether it tells the memory's bandwidth; takes 1 GiB


@dataclass(frozen=True, slots=True)
class Measured:
    """The result of a run. Only tokens that the workload asked for count as output."""

    seconds: float
    output_tokens: int
    peak_rss_mib: float
    tokens_computed: int  # positions run through the model, including padding
    first_token_s: float | None = None  # until any request has a token; None: not known
    bandwidth: float | None = None  # bytes per second of memory: the mean of a reading before the run and one after it


class Ran(NamedTuple):
    """What a runner tells of a run."""

    tokens_computed: int
    first_token_at_s: float | None = None  # by time.perf_counter()


def memory_bandwidth() -> float:
    """Bytes per second at which torch's threads together read memory: the best of some sums over a large array."""
    values = torch.ones(READ_BYTES // 4)
    best_s = float("inf")
    for _ in range(READS):
        started_s = time.perf_counter()
        values.sum()
        best_s = min(best_s, time.perf_counter() - started_s)
    return READ_BYTES / best_s


def run_engine(job: Job) -> Callable[[], Ran]:
    """Continuous batching with `concurrency` requests in flight: a new one is submitted when one ends.

    Returns a function that runs the workload."""
    from trunkline.engine.v1.engine_pb2 import EngineRequest
    from trunkline.v1.generation_pb2 import SamplingParams
    from trunkline.v1.worker_pb2 import Submit
    from trunkline_worker.engine.assembly import build_engine
    from trunkline_worker.model.loading import load_model
    from trunkline_worker.settings import EngineSettings

    settings = EngineSettings(
        model=job.model, dtype=job.dtype, device="cpu", threads=job.threads, quantization=job.quantization
    )
    model = load_model(Path(job.model), dtype=job.dtype, device=torch.device("cpu"), quantization=job.quantization)
    engine, _ = build_engine(settings, model, torch.device("cpu"))

    def submit(handle: int) -> None:
        request = job.requests[handle]
        sampling = SamplingParams(temperature=0, max_tokens=request.output_tokens, ignore_eos=True, seed=0)
        engine.accept(
            EngineRequest(submits=[Submit(handle=handle, prompt_token_ids=request.prompt, sampling=sampling)])
        )

    def run() -> Ran:
        upcoming = iter(range(len(job.requests)))
        for handle in [h for _, h in zip(range(job.concurrency), upcoming, strict=False)]:
            submit(handle)
        generated, first_at_s = 0, None
        while engine.has_work:
            step = engine.step()
            assert step is not None
            generated += len(step.token_ids)
            if generated and first_at_s is None:
                first_at_s = time.perf_counter()
            for output in step.outputs:
                assert not output.HasField("error"), output.error
                generated += len(output.token_ids)
                if output.finish_reason and (following := next(upcoming, None)) is not None:
                    submit(following)
        assert generated == sum(request.output_tokens for request in job.requests)
        computed = sum(len(request.prompt) + request.output_tokens - 1 for request in job.requests)
        return Ran(computed, first_at_s)

    return run


def run_transformers(job: Job) -> Callable[[], Ran]:
    """Static batching: batches in order of arrival, left-padded, each running until its longest output is done.

    Returns a function as run_engine does."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(job.model, dtype=getattr(torch, job.dtype))
    model.train(False)

    def run() -> Ran:
        computed = 0
        for start in range(0, len(job.requests), job.concurrency):
            batch = job.requests[start : start + job.concurrency]
            width = max(len(request.prompt) for request in batch)
            most = max(request.output_tokens for request in batch)
            ids = torch.zeros(len(batch), width, dtype=torch.long)
            mask = torch.zeros_like(ids)
            for row, request in enumerate(batch):
                ids[row, width - len(request.prompt) :] = torch.tensor(request.prompt)
                mask[row, width - len(request.prompt) :] = 1
            with torch.inference_mode():
                out = model.generate(
                    input_ids=ids,
                    attention_mask=mask,
                    do_sample=False,
                    max_new_tokens=most,
                    min_new_tokens=most,
                    pad_token_id=0,
                )
            assert isinstance(out, torch.Tensor)
            assert out.shape == (len(batch), width + most)
            computed += len(batch) * (width + most - 1)
        return Ran(computed)

    return run


def run_vllm(job: Job) -> Callable[[], Ran]:
    """vLLM's CPU build, in a Python that has it. Returns a function as run_engine does."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        job.model, skip_tokenizer_init=True, dtype=job.dtype, max_model_len=2048, enforce_eager=True,
        max_num_seqs=job.concurrency,
    )  # fmt: skip

    def run() -> Ran:
        results = llm.generate(
            [{"prompt_token_ids": request.prompt} for request in job.requests],
            [
                SamplingParams(temperature=0, ignore_eos=True, detokenize=False, max_tokens=request.output_tokens)
                for request in job.requests
            ],
            use_tqdm=False,
        )
        for result, request in zip(results, job.requests, strict=True):
            assert len(result.outputs[0].token_ids) == request.output_tokens
        return Ran(sum(len(request.prompt) + request.output_tokens - 1 for request in job.requests))

    return run


RUNNERS = {"engine": run_engine, "transformers": run_transformers, "vllm": run_vllm}


def measured(job: Job) -> Measured:
    torch.set_num_threads(job.threads)
    warm_up = [BenchRequest(job.requests[0].prompt[:8], 4)]
    run = RUNNERS[job.runner](job)
    # A short run first, so that lazy initialisation is not measured.
    wanted, job.requests[:] = list(job.requests), warm_up
    run()
    job.requests[:] = wanted
    # A virtual machine's bandwidth changes within seconds, so nothing lies between the run and the readings.
    readings = [memory_bandwidth()] if job.reads_memory else []
    started = time.perf_counter()
    computed, first_at_s = run()
    seconds = time.perf_counter() - started
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    if job.reads_memory:
        readings.append(memory_bandwidth())
    output_tokens = sum(request.output_tokens for request in wanted)
    first_s = None if first_at_s is None else first_at_s - started
    bandwidth = statistics.mean(readings) if readings else None
    return Measured(seconds, output_tokens, peak_mib, computed, first_s, bandwidth)


def main() -> None:
    data = json.load(sys.stdin)
    job = Job(**{**data, "requests": [BenchRequest(**request) for request in data["requests"]]})
    print(json.dumps(asdict(measured(job))))


if __name__ == "__main__":
    main()
