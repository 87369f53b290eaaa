"""The whole engine on real shapes with random weights: output tokens per second of many concurrent requests."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from trunkline.engine.v1.engine_pb2 import EngineStep
from trunkline_bench.gpu.ceilings import Rows
from trunkline_bench.gpu.engine.engine_run import EngineUnderTest, running
from trunkline_bench.gpu.kernels.tiling_sweep import FILE
from trunkline_bench.gpu.kernels.tuned_table import using_table
from trunkline_bench.gpu.shapes import Shapes
from trunkline_bench.simulation.costs.fitted_cost import fit
from trunkline_kernels.gpu import tuned_tilings

FITTED = "h200-8b-fitted.json"  # for `trunkline bench simulate --profile`
TUNED_FITTED = "h200-8b-tuned-fitted.json"


def measure(shapes: Shapes) -> Rows:
    """Runs all requests at once, for a time window or until they are done, and fits a step cost for the simulator."""
    yield from _measure(shapes, graphs="auto")


def with_tuned_table(shapes: Shapes) -> Rows:
    """The same with the tilings that the sweeps have found. Raises FileNotFoundError if the sweeps have not run."""
    with tuned_table(shapes) as found:
        yield {"what": "tuned table", "entries": len(found), "own products": sum(map(_is_own_product, found.items()))}
        yield from _measure(shapes, graphs="auto", fitted=TUNED_FITTED)


@contextmanager
def tuned_table(shapes: Shapes) -> Iterator[dict[tuned_tilings.Key, dict[str, int]]]:
    """Engines inside the context read the table of the sweeps. Raises FileNotFoundError if the sweeps have not run."""
    file = shapes.output / FILE
    if not file.exists():
        raise FileNotFoundError(f"{file}: run the tiling sweep and the product sweep first")
    with using_table(file):
        yield tuned_tilings.table(file)


def _is_own_product(entry: tuple[tuned_tilings.Key, dict[str, int]]) -> bool:
    key, tiling = entry
    return key.kernel in tuned_tilings.PRODUCTS and bool(tiling)


def without_graphs(shapes: Shapes) -> Rows:
    """The same without captured graphs: every kernel is launched separately."""
    yield from _measure(shapes, graphs="off")


def _measure(shapes: Shapes, *, graphs: str, fitted: str = FITTED) -> Rows:
    with running(shapes, graphs=graphs) as run:
        yield {"what": "start", "graphs": graphs, "load_s": run.load_s, "warm_up_s": run.warm_up_s}
        samples = run.record()
        yield from saturated(shapes, run)
        (shapes.output / fitted).write_text(fit([sample for sample in samples if sample[1] > 0]).to_json())
        yield {"what": "fitted step cost", "file": fitted, "steps": len(samples)}


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
