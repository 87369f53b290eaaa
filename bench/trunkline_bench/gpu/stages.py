"""The stages of `make bench-gpu`: the function of each, its estimated time, and the call that it belongs to.

GPU machines are available for minutes at a time. The stages are therefore ordered by importance, and the estimates of a
call add up to less than CALL_S. docs/gpu-bench.md shows the plan, and which estimates are not measured.
"""

from dataclasses import dataclass

CALL_S = 540.0  # time limit of a call


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage, which runs in a process of its own."""

    name: str
    function: str  # "module:function", imported only in the stage's process; takes Shapes and yields rows
    call: int  # number of the planned call, from 1
    estimate_s: float  # as measured on an H100, including imports, loading and compiling
    limit_s: float  # the process is killed after this time
    instead_of: str = ""  # the stage runs only if this one has failed


STAGES = (
    Stage("smoke", "trunkline_bench.gpu.engine.smoke:check", 1, 70, 120),
    Stage("headline", "trunkline_bench.gpu.engine.headline:measure", 1, 75, 150),
    Stage("headline without graphs", "trunkline_bench.gpu.engine.headline:without_graphs", 1, 110, 180, "headline"),
    Stage("closed loop", "trunkline_bench.gpu.engine.closed_loop:measure", 1, 90, 150),
    Stage("product sweep", "trunkline_bench.gpu.kernels.product_sweep:measure", 1, 45, 100),
    Stage("tiling sweep", "trunkline_bench.gpu.kernels.tiling_sweep:measure", 1, 60, 120),
    Stage("fp8 with tuned table", "trunkline_bench.gpu.engine.costs:tuned_fp8", 1, 30, 70),
    Stage("fixed products", "trunkline_bench.gpu.kernels.fixed_sweep:measure", 1, 40, 80),
    Stage("prefill attention", "trunkline_bench.gpu.kernels.attention:prefill_speed", 1, 25, 60),
    Stage("decode steps", "trunkline_bench.gpu.engine.decode_steps:measure", 1, 30, 70),
    Stage("engine equality", "trunkline_bench.gpu.engine.equality:check", 1, 35, 80),
    Stage("options", "trunkline_bench.gpu.engine.costs:measure", 2, 70, 130),
    Stage("fp8 checkpoint", "trunkline_bench.gpu.engine.fp8_checkpoint:measure", 2, 40, 120),
    Stage("Llama in fp8", "trunkline_bench.gpu.engine.headline:llama_fp8", 2, 80, 150),
    Stage("weight-only options", "trunkline_bench.gpu.engine.costs:weight_only", 2, 60, 120),
    Stage("weight-only products", "trunkline_bench.gpu.kernels.weight_only_products:measure", 2, 15, 40),
    Stage("experts", "trunkline_bench.gpu.kernels.experts:measure", 2, 30, 70),
    Stage("block product sweep", "trunkline_bench.gpu.kernels.product_sweep:measure_blocks", 2, 45, 100),
    Stage("decode attention", "trunkline_bench.gpu.kernels.attention:decode_speed", 2, 15, 40),
    Stage("attention correctness", "trunkline_bench.gpu.kernels.attention:check", 2, 40, 80),
    Stage("idle share", "trunkline_bench.gpu.engine.decode_steps:idle_share", 2, 30, 60),
    Stage("transformers", "trunkline_bench.gpu.engine.hugging_face:measure", 3, 200, 300),
)
