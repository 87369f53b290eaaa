"""The GPU's runner keeps a device's rules, on a device that is not there: no waiting, safe copies, graphs that do what
their steps need, launches that are what kernels assume.
"""

import ast
import importlib
import itertools
import pkgutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

import trunkline_kernels.gpu
from tests.parameters import one_in
from tests.worker.device import contracts
from tests.worker.device.cards import A100, H200, L4, RTX_4090, Card
from tests.worker.device.faults import DeviceFault, GraphFault, HostSync, LaunchFault
from tests.worker.device.models import IN_BLOCKS, NAMES, spec_of
from tests.worker.device.session import Session, drive, plans_for, session
from trunkline_kernels.gpu import expert_tiles, tuned_tilings
from trunkline_kernels.gpu.expert_products import FIXED, ExpertTilings, multiply_experts
from trunkline_kernels.gpu.expert_tiles import ExpertTiles
from trunkline_kernels.gpu.persistent_linear import ProductRoom
from trunkline_kernels.gpu.tuned_tilings import GATED, ProductKey
from trunkline_worker.model import gpu_experts
from trunkline_worker.model.architectures.decoder_spec import Multipliers
from trunkline_worker.model.gpu_weight import timed_products
from trunkline_worker.settings import EngineSettings
from trunkline_worker.step.plan import BlockCopy, BlockPlace, CopyEnd, StepPlan, Tier

NUM_BLOCKS, CONTEXT = 3000, 4096
SMALL: dict[str, Any] = {"max_step_tokens": 1024, "max_running_requests": 24}


def test_copies_of_blocks_are_put_on_the_queue() -> None:
    """With a step, and without one."""
    with session(spec_of("qwen3-0.6b", layers=2), num_blocks=NUM_BLOCKS, context_length=CONTEXT, **SMALL) as found:
        plan = plans_for(found, EngineSettings("model", **SMALL), NUM_BLOCKS, CONTEXT, 0).next()
        plan.copies = [
            BlockCopy(n, BlockPlace(Tier.DEVICE, n), BlockPlace(Tier.DEVICE, NUM_BLOCKS - n)) for n in (1, 2)
        ]
        for begun in (plan, StepPlan(9, [], copies=plan.copies)):
            assert found.begin(begun)().copies == [CopyEnd(1, True), CopyEnd(2, True)]


def launched_kernels() -> set[str]:
    """Names that the modules of trunkline_kernels.gpu launch: kernel[grid](…)."""
    found = set()
    for info in pkgutil.iter_modules(trunkline_kernels.gpu.__path__):
        module = importlib.import_module(f"trunkline_kernels.gpu.{info.name}")
        assert module.__file__ is not None
        for node in ast.walk(ast.parse(Path(module.__file__).read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                assert isinstance(node.func.value, ast.Name)
                found.add(node.func.value.id)
    return found


def test_every_kernel_has_a_contract() -> None:
    assert launched_kernels() == set(contracts.CONTRACTS)


def run(name: str, options: dict[str, Any], *, count: int, seed: int, card: Card = H200) -> Session:
    """Random plans through a runner with two layers of a model."""
    options = dict(options)
    spec = spec_of(name, layers=options.pop("layers", 2), window=options.pop("window", None))
    settings = EngineSettings("model", **options)
    with session(spec, card=card, num_blocks=NUM_BLOCKS, context_length=CONTEXT, seed=seed, **options) as found:
        drive(found, plans_for(found, settings, NUM_BLOCKS, CONTEXT, seed), count)
    return found


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("qwen3-8b", {}),
        ("qwen3-0.6b", {"kv_dtype": "fp8", "quantization": "int4", "block_size": 32}),
        pytest.param("llama-3.1-8b", {"deterministic": True}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_random_steps_keep_the_rules(name: str, options: dict[str, Any]) -> None:
    found = run(name, {**SMALL, **options}, count=60, seed=1)
    assert found.replays > 30
    assert {
        "_tile_peaks",
        "_choose",
        "_draw",
        "_pick",
        "_penalise",
        "_tile_logprobs",
        "_row_logprobs",
        "_add_bias",
        "_exclude",
    } <= found.device.launches.keys()


@pytest.mark.parametrize("options", [{}, pytest.param({"deterministic": True}, marks=pytest.mark.slow)], ids=str)
def test_what_few_families_compute_keeps_the_rules(options: dict[str, Any]) -> None:
    plain = spec_of("qwen3-0.6b", layers=3)
    attention = plain.layers[0].attention
    assert attention.rope is not None
    kinds = (
        replace(attention, qk_norm_span="all heads", norm=None, post_norm="post_attention_layernorm"),
        replace(attention, rope=replace(attention.rope, width=96)),
        replace(attention, rope=None),
    )
    spec = replace(
        plain,
        layers=tuple(replace(layer, attention=kind) for layer, kind in zip(plain.layers, kinds, strict=True)),
        multipliers=Multipliers(embedding=12.0, attention=0.0078125, residual=0.22, logits=8.0),
    )
    settings = EngineSettings("model", **SMALL, **options)
    with session(spec, num_blocks=NUM_BLOCKS, context_length=CONTEXT, seed=6, **SMALL, **options) as found:
        drive(found, plans_for(found, settings, NUM_BLOCKS, CONTEXT, 6), 40)
    assert found.replays > 20


OPTIONS: list[dict[str, Any]] = [
    {},
    {"deterministic": True},
    {"deterministic": True, "kv_dtype": "fp8", "max_step_tokens": 200, "max_running_requests": 300},
    {"quantization": "fp8", "kv_dtype": "fp8"},
    {"quantization": "int8", "window": 512},
    {"quantization": "int4", "block_size": 4},
    {"graphs": "off"},
    {"max_running_requests": 1},
    {"max_running_requests": 5, "max_step_tokens": 8192},
    {"max_step_tokens": 7},
]


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_random_steps_with_each_option_keep_the_rules(options: dict[str, Any]) -> None:
    """The models in turn."""
    name = NAMES[OPTIONS.index(options) % len(NAMES)]
    limits = {"max_step_tokens": 2048, "max_running_requests": 256}
    run(name, {**limits, **options}, count=100, seed=OPTIONS.index(options))


@pytest.mark.slow
@pytest.mark.parametrize("card", [A100, RTX_4090, L4], ids=lambda card: card.name)
@pytest.mark.parametrize("options", [{}, {"deterministic": True}], ids=str)
def test_other_cards_get_tilings_of_their_own(card: Card, options: dict[str, Any]) -> None:
    run("qwen3-8b", {**SMALL, **options}, count=40, seed=3, card=card)


@pytest.mark.parametrize(
    ("options", "dtype", "expected"),
    [
        ({"quantization": "fp8"}, "float8_e4m3fn", {"_fp8_product", "_persistent_matmul"}),
        pytest.param({}, "bfloat16", set(), marks=pytest.mark.slow),
        pytest.param({"quantization": "fp8"}, "bfloat16", {"_persistent_matmul"}, marks=pytest.mark.slow),
        pytest.param({"quantization": "int8"}, "bfloat16", set(), marks=pytest.mark.slow),
    ],
    ids=lambda value: "-".join(sorted(value)) if isinstance(value, set) else str(value),
)
def test_an_own_product_keeps_the_rules_where_it_was_the_faster_one(
    options: dict[str, Any], dtype: str, expected: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_of("qwen3-0.6b")
    tiling = {"rows": 64, "columns": 64, "inner": 64, "warps": 4, "stages": 4}
    qkv, output, gate_up, down = timed_products(spec.layers[0])
    entries = {
        (8, gate_up): tiling,
        (16, gate_up): {**tiling, "programs": 1},
        (16, qkv): {**tiling, "programs": 2},
        (16, output): {**tiling, "rows": 16, "programs": 2},
        (16, down): {**tiling, "columns": 128, "programs": 1},
    }
    tuned_tilings.write(
        tmp_path / "tuned.json",
        {
            ProductKey(kernel, H200.name, rows, columns, inner, dtype): (fields, {})
            for (rows, (kernel, columns, inner)), fields in entries.items()
        },
    )
    monkeypatch.setenv(tuned_tilings.VARIABLE, str(tmp_path / "tuned.json"))
    found = run("qwen3-0.6b", {**SMALL, **options}, count=30, seed=2)
    assert {"_fp8_product", "_persistent_matmul"} & found.device.launches.keys() == expected


def test_fp8_products_of_the_library_keep_the_rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of("qwen3-0.6b")
    key = ProductKey(GATED, H200.name, 16, spec.layers[0].feed_forward.down.inner, spec.hidden_size, "float8_e4m3fn")
    tuned_tilings.write(tmp_path / "tuned.json", {key: ({}, {})})
    monkeypatch.setenv(tuned_tilings.VARIABLE, str(tmp_path / "tuned.json"))
    launches = run("qwen3-0.6b", {**SMALL, "quantization": "fp8"}, count=30, seed=2).device.launches
    assert launches["_fp8_product"] < launches["_quantize_rows"], "the library multiplied nothing"


@pytest.mark.parametrize(("card", "kernel"), [(H200, "_persistent_matmul"), (L4, "_fp8_product")], ids=str)
def test_weights_in_blocks_keep_the_rules(card: Card, kernel: str) -> None:
    launches = run("qwen3-0.6b", {**SMALL, "quantization": IN_BLOCKS}, count=30, seed=2, card=card).device.launches
    assert {"_persistent_matmul", "_fp8_product"} & launches.keys() == {kernel}


EXPERT_KERNELS = {"_choose_experts", "_arrange_tiles", "_expert_product", "_sum_experts"}


@pytest.mark.parametrize(
    "options",
    one_in(5, [{}, {"deterministic": True}, *({"quantization": kind} for kind in ("int8", "int4", "fp8", IN_BLOCKS))]),
    ids=str,
)
def test_mixtures_of_experts_keep_the_rules(options: dict[str, Any]) -> None:
    found = run("qwen3-30b-a3b", {**SMALL, **options}, count=30, seed=6)
    assert found.replays > 15
    assert found.device.launches.keys() >= EXPERT_KERNELS


@pytest.mark.parametrize("deterministic", [True, False])
def test_tiles_depend_on_the_rows_of_experts_unless_deterministic(
    deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: set[ExpertTilings] = set()

    def noted(*arguments: Any, tilings: ExpertTilings, **options: Any) -> Tensor:
        seen.add(tilings)
        return multiply_experts(*arguments, tilings=tilings, **options)

    monkeypatch.setattr(gpu_experts, "multiply_experts", noted)
    run("qwen3-30b-a3b", {**SMALL, "deterministic": deterministic}, count=5, seed=6)
    assert (seen == {FIXED}) == deterministic
    assert deterministic or {tilings.down.rows for tilings in seen} == {16, 32, 64, 128}


def counts_on_the_host(real: Any, experts: Tensor, **options: Any) -> Any:
    experts.max().item()
    return real(experts, **options)


def room_for_few_tiles(real: Any, num_pairs: int, *sizes: int) -> int:
    return -(-num_pairs // 16)


def tiles_by_the_step(real: Any, num_pairs: int, *sizes: int) -> int:
    found: int = real(num_pairs, *sizes) + next(COUNT)
    return found


COUNT = itertools.count()


@pytest.mark.parametrize(
    ("fault", "message", "owner", "name", "mutant"),
    [
        (HostSync, "the host reads", ExpertTiles, "arrange", counts_on_the_host),
        (LaunchFault, "are read or written", expert_tiles, "most_tiles", room_for_few_tiles),
        (GraphFault, "was captured as", expert_tiles, "most_tiles", tiles_by_the_step),
    ],
)
def test_a_fault_among_experts_is_noticed(
    fault: type[DeviceFault],
    message: str,
    owner: Any,
    name: str,
    mutant: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args, **options: mutant(real, *args, **options))
    with pytest.raises(fault, match=message):
        run("qwen3-30b-a3b", SMALL, count=30, seed=6)


@pytest.mark.slow
def test_a_whole_model_keeps_the_rules() -> None:
    run("qwen3-8b", {"layers": None, "max_step_tokens": 2048, "max_running_requests": 64}, count=8, seed=4)


def room_of_one_multiprocessor(patch: pytest.MonkeyPatch) -> None:
    real = ProductRoom.allocate

    def allocate(tilings: Any, *, multiprocessors: int, device: Any) -> ProductRoom:
        return replace(real(tilings, multiprocessors=1, device=device), multiprocessors=multiprocessors)

    patch.setattr(ProductRoom, "allocate", allocate)


def descriptors_of_other_blocks(patch: pytest.MonkeyPatch) -> None:
    real = TensorDescriptor.from_tensor
    patch.setattr(TensorDescriptor, "from_tensor", lambda tensor, block: real(tensor, [block[0], 2 * block[1]]))


@pytest.mark.parametrize(
    ("mutant", "fault"), [(room_of_one_multiprocessor, "shares has"), (descriptors_of_other_blocks, "x is read by")]
)
def test_a_persistent_product_without_what_it_assumes_is_noticed(
    mutant: Callable[[pytest.MonkeyPatch], None], fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_of("qwen3-0.6b")
    tiling = {"rows": 64, "columns": 64, "inner": 64, "warps": 4, "stages": 4, "programs": 1}
    key = ProductKey(GATED, H200.name, 16, spec.layers[0].feed_forward.down.inner, spec.hidden_size, "float8_e4m3fn")
    tuned_tilings.write(tmp_path / "tuned.json", {key: (tiling, {})})
    monkeypatch.setenv(tuned_tilings.VARIABLE, str(tmp_path / "tuned.json"))
    mutant(monkeypatch)
    with pytest.raises(LaunchFault, match=fault):
        run("qwen3-0.6b", {**SMALL, "quantization": "fp8"}, count=30, seed=2)
