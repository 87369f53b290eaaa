"""The whole engine on real shapes with random weights: output tokens per second of many concurrent requests."""

import time
from dataclasses import replace

from trunkline.engine.v1.engine_pb2 import EngineStep
from trunkline_bench.gpu.ceilings import Rows
from trunkline_bench.gpu.engine.engine_run import EngineUnderTest, running
from trunkline_bench.gpu.shapes import CONFIGS, Shapes
from trunkline_bench.simulation.costs.fitted_cost import fit

FITTED = "8b-fitted.json"  # for `trunkline bench simulate --profile`


def measure(shapes: Shapes) -> Rows:
    """Runs all requests at once, for a time window or until they are done, and fits a step cost for the simulator."""
    yield from _measure(shapes, graphs="auto")


def without_graphs(shapes: Shapes) -> Rows:
    """The same without captured graphs: every kernel is launched separately."""
    yield from _measure(shapes, graphs="off")


def llama_fp8(shapes: Shapes) -> Rows:
    """Llama-3.1-8B with fp8 weights and keys, 1,000 tokens in and 1,000 out, as TensorRT-LLM publishes it for 3,000
    requests."""
    if not shapes.tiny:
        shapes = replace(shapes, model=CONFIGS / "llama-3.1-8b", requests=512, prompt_tokens=1000, output_tokens=1000)
    with running(shapes, quantization="fp8", kv_dtype="fp8") as run:
        yield from saturated(shapes, run)


def _measure(shapes: Shapes, *, graphs: str) -> Rows:
    with running(shapes, graphs=graphs) as run:
        yield {"what": "start", "graphs": graphs, "load_s": run.load_s, "warm_up_s": run.warm_up_s}
        samples = run.record()
        yield from saturated(shapes, run)
        (shapes.output / FITTED).write_text(fit([sample for sample in samples if sample[1] > 0]).to_json())
        yield {"what": "fitted step cost", "file": FITTED, "steps": len(samples)}


def saturated(shapes: Shapes, run: EngineUnderTest) -> Rows:
    """Submits all requests at the start. Output tokens per second of the whole run, and once all prompts are done."""
    decode_from: tuple[float, int] | None = None

    def count() -> int:
        return sum(len(stream.tokens) for stream in run.streams.values())

    def watch(step: EngineStep) -> None:
        nonlocal decode_from
        if decode_from is None and all(stream.tokens for stream in run.streams.values()):
            decode_from = time.perf_counter(), count()

    for handle in range(shapes.requests):
        run.submit(handle, run.prompt(handle, shapes.prompt_tokens), shapes.output_tokens)
    started_s = time.perf_counter()
    run.run(started_s + shapes.engine_window_s, watch)
    ended_s = time.perf_counter()
    yield {
        "what": f"{shapes.requests} x ({shapes.prompt_tokens} in, {shapes.output_tokens} out)",
        "model": shapes.model.name, "output_tok_per_s": count() / (ended_s - started_s),
        "window_s": ended_s - started_s, "finished": not run.engine.has_work,
    }  # fmt: skip
    if decode_from is not None and count() > decode_from[1]:
        rate = (count() - decode_from[1]) / (ended_s - decode_from[0])
        yield {"what": "decode alone", "output_tok_per_s": rate}
