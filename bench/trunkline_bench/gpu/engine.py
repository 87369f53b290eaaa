"""The whole engine on real shapes with random weights: output tokens per second, time of a decode step."""

import statistics
import time
from collections import defaultdict

from trunkline.engine.v1.engine_pb2 import EngineRequest
from trunkline.v1.generation_pb2 import SamplingParams
from trunkline.v1.worker_pb2 import Submit
from trunkline_bench.gpu.ceilings import Rows
from trunkline_bench.gpu.shapes import Shapes
from trunkline_worker.engine_process import build_engine
from trunkline_worker.model.loading import load_model
from trunkline_worker.settings import EngineSettings


def measure(shapes: Shapes) -> Rows:
    """All requests at once, for a window of time or until they are done."""
    settings = EngineSettings(
        model=str(shapes.model), dtype="auto", load_format="auto" if shapes.tiny else "dummy",
        device=shapes.device.type, kernels="triton",
        max_step_tokens=64 if shapes.tiny else 8192, max_running_requests=shapes.requests,
        itl_target_ms=0.0, interactive_reserve=0.0, kv_blocks=64 if shapes.tiny else None,
        context_length=256 if shapes.tiny else 4096,
    )  # fmt: skip
    started_s = time.perf_counter()
    model = load_model(
        shapes.model, dtype=settings.dtype, device=shapes.device, load_format=settings.load_format,
        kernels=settings.kernels, context_length=settings.context_length,
    )  # fmt: skip
    engine, _ = build_engine(settings, model, shapes.device)
    ready_s = time.perf_counter() - started_s
    sampling = SamplingParams(temperature=0, max_tokens=shapes.output_tokens, ignore_eos=True, seed=0)
    prompt_base = model.spec.vocab_size // 2
    submits = [
        Submit(
            handle=handle,
            prompt_token_ids=[(handle * 7919 + at * 31) % prompt_base for at in range(shapes.prompt_tokens)],
            sampling=sampling,
        )
        for handle in range(shapes.requests)
    ]
    started_s = time.perf_counter()
    engine.accept(EngineRequest(submits=submits))
    tokens = 0
    decode_from: tuple[float, int] | None = None  # when every prompt was done
    step_times: defaultdict[int, list[float]] = defaultdict(list)
    firsts = 0
    while engine.has_work and time.perf_counter() - started_s < shapes.engine_window_s:
        step = engine.step()
        if step is None:
            continue
        made = len(step.token_ids)
        for output in step.outputs:
            assert not output.HasField("error"), output.error
            made += len(output.token_ids)
            firsts += output.HasField("prompt")
        tokens += made
        if firsts == shapes.requests:
            now_s = time.perf_counter()
            if decode_from is None:
                decode_from = (now_s, tokens)
            step_times[made].append(engine.scheduler.stats.last.device_time_s)
    seconds = time.perf_counter() - started_s
    rows: Rows = [
        {
            "what": f"{shapes.requests} x ({shapes.prompt_tokens} in, {shapes.output_tokens} out)",
            "model": shapes.model.name, "output_tok_per_s": tokens / seconds, "window_s": seconds,
            "finished": not engine.has_work, "ready_s": ready_s,
        }
    ]  # fmt: skip
    if decode_from is not None and tokens > decode_from[1]:
        rate = (tokens - decode_from[1]) / (time.perf_counter() - decode_from[0])
        rows.append({"what": "decode alone", "output_tok_per_s": rate})
    for batch, times in sorted(step_times.items()):
        if batch and len(times) >= 5:
            rows.append({"what": "decode step", "batch": batch, "median_ms": statistics.median(times) * 1e3})
    return rows
