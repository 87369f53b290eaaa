"""What options cost or gain: the same decodes with and without each."""

import time

from trunkline.engine.v1.engine_pb2 import EngineStep
from trunkline_bench.gpu.ceilings import Rows
from trunkline_bench.gpu.engine_run import running
from trunkline_bench.gpu.shapes import Shapes

Options = dict[str, dict[str, object]]

OPTIONS: Options = {
    "--deterministic": {"deterministic": True},
    "--kv-dtype fp8": {"kv_dtype": "fp8"},
    "--quantization fp8": {"quantization": "fp8"},
}
WEIGHT_ONLY: Options = {
    "--quantization int8": {"quantization": "int8"},
    "--quantization int4": {"quantization": "int4"},
}


def measure(shapes: Shapes) -> Rows:
    """Output tokens per second of all requests once every prompt is done, and against the plain engine."""
    return _against_plain(shapes, OPTIONS)


def weight_only(shapes: Shapes) -> Rows:
    """The same of weights alone in few bits."""
    return _against_plain(shapes, WEIGHT_ONLY)


def _against_plain(shapes: Shapes, ways: Options) -> Rows:
    plain = _decode_rate(shapes, {})
    rows: Rows = [{"what": "plain", "output_tok_per_s": plain}]
    for name, options in ways.items():
        rate = _decode_rate(shapes, options)
        rows.append({"what": name, "output_tok_per_s": rate, "of_plain": rate / plain})
    return rows


def _decode_rate(shapes: Shapes, options: dict[str, object]) -> float:
    with running(shapes, **options) as run:
        begun: list[tuple[float, int]] = []

        def count() -> int:
            return sum(len(stream.tokens) for stream in run.streams.values())

        def watch(step: EngineStep) -> None:
            if not begun and all(stream.tokens for stream in run.streams.values()):
                begun.append((time.perf_counter(), count()))

        for handle in range(shapes.requests):
            run.submit(handle, run.prompt(handle, shapes.cost_prompt_tokens), shapes.cost_output_tokens)
        run.run(each_step=watch)
        ended_s = time.perf_counter()
        began_s, tokens = begun[0]
        return (count() - tokens) / (ended_s - began_s)
