"""Cost or gain of engine options: the same requests with and without each."""

import time

from trunkline.engine.v1.engine_pb2 import EngineStep
from trunkline_bench.gpu.ceilings import Rows
from trunkline_bench.gpu.engine.engine_run import EngineUnderTest, running
from trunkline_bench.gpu.kernels.tiling_sweep import FILE
from trunkline_bench.gpu.kernels.tuned_table import using_table
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
    """Prompt and output tokens per second with each option, absolute and relative to the engine without options."""
    yield from _against_plain(shapes, OPTIONS)


def weight_only(shapes: Shapes) -> Rows:
    """The same for weight-only quantization."""
    yield from _against_plain(shapes, WEIGHT_ONLY)


def tuned_fp8(shapes: Shapes) -> Rows:
    """fp8 weights with and without the table of the sweeps. Raises FileNotFoundError if there is no table."""
    file, empty = shapes.output / FILE, shapes.output / "no-tilings.json"
    if not file.exists():
        raise FileNotFoundError(f"{file}: run the product sweep first")
    options = OPTIONS["--quantization fp8"]
    with using_table(file):
        tuned = _rates(shapes, options)
    yield {"what": "fp8 weights, tuned table", "prompt_tok_per_s": tuned[0], "output_tok_per_s": tuned[1]}
    empty.write_text("[]\n")
    with using_table(empty):
        own = _rates(shapes, options)
    yield {
        "what": "fp8 weights, own product", "prompt_tok_per_s": own[0], "output_tok_per_s": own[1],
        "prompts_of_tuned": own[0] / tuned[0], "of_tuned": own[1] / tuned[1],
    }  # fmt: skip


def _against_plain(shapes: Shapes, ways: Options) -> Rows:
    plain = _rates(shapes, {})
    yield {"what": "plain", "prompt_tok_per_s": plain[0], "output_tok_per_s": plain[1]}
    for name, options in ways.items():
        prompts, output = _rates(shapes, options)
        yield {
            "what": name, "prompt_tok_per_s": prompts, "output_tok_per_s": output,
            "prompts_of_plain": prompts / plain[0], "of_plain": output / plain[1],
        }  # fmt: skip


def _rates(shapes: Shapes, options: dict[str, object]) -> tuple[float, float]:
    with running(shapes, **options) as run:
        return rates(shapes, run)


def rates(shapes: Shapes, run: EngineUnderTest) -> tuple[float, float]:
    """Returns prompt tokens per second until every prompt is done, and output tokens per second from then on."""
    begun: list[tuple[float, int]] = []

    def count() -> int:
        return sum(len(stream.tokens) for stream in run.streams.values())

    def watch(step: EngineStep) -> None:
        if not begun and all(stream.tokens for stream in run.streams.values()):
            begun.append((time.perf_counter(), count()))

    for handle in range(shapes.requests):
        run.submit(handle, run.prompt(handle, shapes.cost_prompt_tokens), shapes.cost_output_tokens)
    started_s = time.perf_counter()
    run.run(each_step=watch)
    ended_s = time.perf_counter()
    began_s, tokens = begun[0]
    prompts = shapes.requests * shapes.cost_prompt_tokens / (began_s - started_s)
    return prompts, (count() - tokens) / (ended_s - began_s)
