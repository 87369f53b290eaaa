"""Sizes of what the stages measure: those of an 8B model on a GPU, or tiny ones to try the stages on a CPU."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from trunkline_kernels.routing_rule import RoutingRule

# Upper bound of the device's clock; with a slower clock the sleep is longer than necessary.
MOST_CYCLES_PER_S = 2.2e9
LEAST_SLEEP_S = 50e-6
CONFIGS = Path(__file__).parents[2] / "configs"
DEMO_MODEL = Path(__file__).parents[3] / "deploy" / "demo" / "tiny-tales"
EXPERTS = RoutingRule(128, 8, renormalized=True)  # Qwen3-30B-A3B's


@dataclass(frozen=True, slots=True)
class Shapes:
    """Sizes of a measurement. `tiny`: small enough for Triton's interpreter."""

    device: torch.device
    dtype: torch.dtype
    tiny: bool
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    num_layers: int = 36
    block_size: int = 16
    copy_bytes: int = 1 << 31
    short_copies: tuple[int, ...] = (1 << 24, 24 << 20, 48 << 20, 96 << 20)
    matmul: int = 8192
    decode_batches: tuple[int, ...] = (1, 4, 16, 64, 128, 256)
    decode_contexts: tuple[int, ...] = (512, 2048, 8192, 32768)
    sweep_decodes: tuple[tuple[int, int], ...] = ((256, 1536), (32, 8192), (1, 4096))  # (sequences, context)
    sweep_prompts: tuple[tuple[int, int], ...] = ((8, 1024), (1, 8192))  # (sequences, tokens)
    product_rows: tuple[int, ...] = (1, 8, 32, 64, 128, 256, 512, 2048, 8192)
    weight_only_rows: tuple[int, ...] = (1, 16, 64, 128, 256, 384, 512, 1024, 8192)
    block_product_rows: tuple[int, ...] = (1, 64, 256, 1024, 8192)
    experts: RoutingRule = EXPERTS
    expert_hidden: int = 2048
    expert_intermediate: int = 768
    expert_rows: tuple[int, ...] = (1, 16, 64, 256, 4096)
    most_kv_bytes: int = 40 << 30
    # (sequences, tokens of each)
    prefill: tuple[tuple[int, int], ...] = (
        (1, 1024), (8, 1024), (1, 2048), (4, 2048), (1, 4096), (1, 8192), (1, 32768),
    )  # fmt: skip
    model: Path = CONFIGS / "qwen3-8b"
    requests: int = 256
    prompt_tokens: int = 1024
    output_tokens: int = 1024
    engine_window_s: float = 60.0
    step_batches: tuple[int, ...] = (1, 8, 32, 64, 128, 256)
    users: int = 128
    user_prompt_tokens: int = 512
    user_output_tokens: int = 256
    closed_loop_s: float = 40.0
    cost_prompt_tokens: int = 512
    cost_output_tokens: int = 192
    peer: tuple[int, int, int] = (128, 1024, 256)  # requests, tokens in, tokens out
    shared_prefix: tuple[int, int, int] = (128, 8192, 512)  # decodes, tokens they share, tokens of their own
    output: Path = Path("results")  # folder for a stage's files other than its rows

    @classmethod
    def of(cls, device: torch.device, output: Path, tiny_model: Path | None = None) -> "Shapes":
        """The sizes of an 8B model, or tiny ones with `tiny_model`."""
        if tiny_model is None:
            return cls(device, torch.bfloat16, False, output=output)
        return cls(
            device, torch.float32, True, num_heads=4, num_kv_heads=2, head_dim=16, num_layers=3, copy_bytes=1 << 16,
            short_copies=(), matmul=64, decode_batches=(1, 3), decode_contexts=(20, 70), sweep_decodes=((2, 70),),
            sweep_prompts=((1, 33),), product_rows=(1, 20), block_product_rows=(20,), weight_only_rows=(3,),
            experts=RoutingRule(4, 2), expert_hidden=128, expert_intermediate=128, expert_rows=(1, 5),
            prefill=((2, 33),), model=tiny_model, requests=2, prompt_tokens=9, output_tokens=3, engine_window_s=30.0,
            step_batches=(1, 2), users=2, user_prompt_tokens=6, user_output_tokens=3, closed_loop_s=0.0,
            cost_prompt_tokens=3, cost_output_tokens=2, peer=(2, 5, 2), shared_prefix=(5, 64, 9), output=output,
        )  # fmt: skip


def median_s(function: Callable[[], object], device: torch.device, *, repeats: int = 20) -> float:
    """Median time of a call on the device in seconds, with caches flushed before each call.

    Before each call the device sleeps for longer than the host takes to launch it. Otherwise the time of a kernel that
    is shorter than its launch would include gaps.
    """
    if device.type != "cuda":
        return _host_s(function)
    flush = torch.empty(256 << 20, dtype=torch.int8, device=device)
    for _ in range(3):
        function()
    torch.cuda.synchronize(device)
    sleep_cycles = int((2 * _host_s(function) + LEAST_SLEEP_S) * MOST_CYCLES_PER_S)
    events = [
        tuple(torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        for _ in range(repeats)
    ]
    for start, end in events:  # all calls are queued before the first one has run
        flush.zero_()
        torch.cuda._sleep(sleep_cycles)  # type: ignore[no-untyped-call]
        start.record()
        function()
        end.record()
    torch.cuda.synchronize(device)
    times: list[float] = sorted(start.elapsed_time(end) / 1e3 for start, end in events)
    return times[repeats // 2]


def _host_s(function: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    function()
    return time.perf_counter() - started_s
