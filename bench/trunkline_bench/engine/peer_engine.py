"""Runs our engine over the workload of the comparison with a peer, and prints one JSON line per row.

usage: python -m trunkline_bench.engine.peer_engine MODEL_DIR DTYPE AT_ONCE     (rows of at most so many requests)
"""

import gc
import json
import os
import random
import sys
import time
from pathlib import Path

import torch

from trunkline.engine.v1.engine_pb2 import EngineRequest
from trunkline.v1.generation_pb2 import SamplingParams
from trunkline.v1.worker_pb2 import Submit
from trunkline_worker.engine.assembly import build_engine
from trunkline_worker.engine.engine import Engine
from trunkline_worker.model.cpu_decoder import CpuDecoder
from trunkline_worker.model.loading import load_model
from trunkline_worker.settings import EngineSettings

# (requests at once, prompt tokens, output tokens)
WORKLOAD = ((1, 32, 128), (16, 32, 128), (64, 128, 128), (256, 64, 64))
VOCAB = 32_000
STEP_TOKENS = 2048


def prompts(count: int, length: int) -> list[list[int]]:
    """Prompts of random tokens, the same for every engine."""
    draw = random.Random(1)
    return [[draw.randint(3, VOCAB - 1) for _ in range(length)] for _ in range(count)]


def output_rate(engine: Engine, count: int, prompt: int, output: int) -> float:
    """Output tokens per second of `count` greedy requests that arrive together."""
    sampling = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True, seed=0)
    submits = [
        Submit(handle=handle, prompt_token_ids=tokens, sampling=sampling, cache_salt=os.urandom(8))
        for handle, tokens in enumerate(prompts(count, prompt))
    ]
    started_s = time.perf_counter()
    engine.accept(EngineRequest(submits=submits))
    generated = 0
    while engine.has_work:
        step = engine.step()
        if step is not None:
            generated += len(step.token_ids) + sum(len(one.token_ids) for one in step.outputs)
    assert generated == count * output
    return generated / (time.perf_counter() - started_s)


def gemm_floor(decoder: CpuDecoder, count: int, prompt: int, output: int) -> float:
    """Output tokens per second if steps took only the time of their matrix products, at their numbers of rows."""

    def seconds(rows: int, sampled: int) -> float:
        multiply = decoder.multiply_only(rows, sampled)
        times = []
        for _ in range(5):
            started_s = time.perf_counter()
            multiply()
            times.append(time.perf_counter() - started_s)
        return min(times)

    chunk = min(STEP_TOKENS, count * prompt)
    prefill_s = count * prompt / chunk * seconds(chunk, max(1, chunk // prompt))
    return count * output / (prefill_s + (output - 1) * seconds(count, count))


def main() -> None:
    model_dir, dtype, at_once = sys.argv[1:4]
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    device = torch.device("cpu")
    model = load_model(Path(model_dir), dtype=dtype, device=device, context_length=2048)
    # The same bounds as the peer's; no target for the time of a step, since the peer has none.
    settings = EngineSettings(
        model=model_dir, dtype=dtype, device="cpu", max_running_requests=256, max_step_tokens=STEP_TOKENS,
        itl_target_ms=0.0, interactive_reserve=0.0, kv_blocks=4096,
    )  # fmt: skip
    engine, _ = build_engine(settings, model, device)
    gc.freeze()
    output_rate(engine, 4, 16, 8)  # so that lazy initialisation is not measured
    for count, prompt, output in (row for row in WORKLOAD if row[0] <= int(at_once)):
        row = {"at_once": count, "tok_s": output_rate(engine, count, prompt, output)}
        if isinstance(model.decoder, CpuDecoder):
            with torch.inference_mode():
                row["gemm_floor_tok_s"] = gemm_floor(model.decoder, count, prompt, output)
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
