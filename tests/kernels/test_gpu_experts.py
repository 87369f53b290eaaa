"""Experts in Triton, interpreted, against the references: routing, tiles, and grouped products."""

import itertools
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from tests.kernels.tensors import random as drawn
from tests.parameters import one_in
from trunkline_kernels import expert_routing, experts
from trunkline_kernels.expert_routing import Routing
from trunkline_kernels.gpu import expert_choice, expert_products, expert_tiles
from trunkline_kernels.gpu.expert_choice import route
from trunkline_kernels.gpu.expert_products import (
    BY_ROWS,
    FIXED,
    MANY_ROWS,
    WIDE,
    ExpertTilings,
    ExpertWeight,
    expert_tilings,
    multiply_experts,
)
from trunkline_kernels.gpu.expert_tiles import FEW_PAIRS, ExpertTiles, most_tiles
from trunkline_kernels.gpu.matmul_tiling import MatmulTiling
from trunkline_kernels.gpu.quantized_linear import quantize_groups, quantize_rows
from trunkline_kernels.quantized_weight import (
    BLOCK,
    FP8,
    QuantizedWeight,
    dequantize,
    packed_int4,
    quantize,
)
from trunkline_kernels.routing_rule import RoutingRule
from trunkline_kernels.silu_and_mul import silu_and_mul

# Small ones, of which even few tokens need several.
TILINGS = ExpertTilings(MatmulTiling(4, 8, 16, 1, 1), MatmulTiling(4, 16, 16, 1, 1))
RANDOM = 20  # routings of a test


@pytest.fixture(autouse=True)
def uninitialised_memory_is_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def assert_routed(logits: Tensor, rule: RoutingRule, bias: Tensor | None = None) -> None:
    expected, found = expert_routing.route(logits, rule, bias), route(logits, rule, bias)
    assert torch.equal(found.experts.long(), expected.experts)
    torch.testing.assert_close(found.shares, expected.shares, equal_nan=True)


RULES = [
    RoutingRule(1, 1),
    RoutingRule(8, 2, renormalized=True),
    RoutingRule(7, 7),
    RoutingRule(60, 4, scale=2.5),
    RoutingRule(128, 8, renormalized=True),
    RoutingRule(300, 3),  # more than one warp
    RoutingRule(24, 5, scores="sigmoid", renormalized=True, scale=2.5, num_groups=4, top_groups=2),
    RoutingRule(30, 6, num_groups=5, top_groups=3),
    RoutingRule(6, 2, scores="sigmoid", num_groups=6, top_groups=3),  # groups of one
]


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_tokens_choose_the_experts_of_the_reference(rule: RoutingRule, biased: bool) -> None:
    bias = drawn(rule.num_experts) if biased else None
    assert_routed(drawn(5, rule.num_experts), rule, bias)
    assert_routed(drawn(5, rule.num_experts).mul(2).round() / 2, rule, bias)  # equal ones among them


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_of_equal_scores_the_lower_index_is_chosen(rule: RoutingRule) -> None:
    logits = torch.zeros(2, rule.num_experts)
    logits[1, rule.num_experts // 2 :] = 1.0
    assert_routed(logits, rule)
    if rule.num_groups == 1:
        assert route(logits, rule).experts[0].tolist() == [*range(rule.top_k)]


@pytest.mark.filterwarnings("ignore:invalid value")  # NumPy's
@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_logits_that_are_not_finite_choose_experts_that_exist(scores: str) -> None:
    logits = drawn(4, 12)
    logits[0, 3], logits[1, 4:] = torch.nan, -torch.inf
    logits[2], logits[3] = torch.nan, -torch.inf
    for groups, top_groups in ((1, 1), (4, 2)):
        rule = RoutingRule(12, 3, scores=scores, num_groups=groups, top_groups=top_groups)  # type: ignore[arg-type]
        assert_routed(logits, rule)


def test_logits_of_16_bits_are_routed_as_they_are() -> None:
    logits = drawn(6, 40).half()
    rule = RoutingRule(40, 4, renormalized=True)
    expected, found = expert_routing.route(logits.float(), rule), route(logits, rule)
    assert torch.equal(found.experts.long(), expected.experts)
    torch.testing.assert_close(found.shares, expected.shares)


@pytest.mark.filterwarnings("ignore:invalid value")
def test_padding_has_no_expert() -> None:
    rule, logits = RoutingRule(10, 3), drawn(4, 10)
    logits[3] = torch.nan
    found = route(logits, rule, kv_slots=torch.tensor([5, -1, 0, -1]))
    expected = expert_routing.route(logits, rule)
    assert torch.equal(found.experts[[0, 2]].long(), expected.experts[[0, 2]])
    assert (found.experts[[1, 3]] == 10).all()
    assert not found.shares[[1, 3]].any()


def assert_tiled(chosen: Tensor, num_experts: int, rows: int) -> None:
    """Each pair is in one tile, that of its expert, in order; only the last tile of an expert is not full."""
    loads = torch.full([num_experts], 1 << 40)
    tiles = ExpertTiles.arrange(chosen, num_experts=num_experts, rows=rows, loads=loads)
    counted = torch.bincount(chosen[chosen < num_experts], minlength=num_experts)
    assert torch.equal(loads - (1 << 40), counted), "what was there before counts, and padding does not"
    found: list[int] = []
    expected: list[int] = []
    used = zip(tiles.experts.tolist(), tiles.pairs.tolist(), strict=True)
    of_expert = itertools.groupby(itertools.islice(used, int(tiles.num_tiles)), key=lambda tile: tile[0])
    for expert, group in of_expert:
        pairs = [pair for _, tile in group for pair in tile]
        own = (chosen.flatten() == expert).nonzero().flatten().tolist()
        assert pairs == own + [-1] * (-len(own) % rows)
        found += own
        expected.append(expert)
    assert len(found) == int((chosen < num_experts).sum())
    assert expected == sorted(set(expected)), "the tiles of an expert are neighbours"


@pytest.mark.parametrize("rows", [1, 4, 16])
@pytest.mark.parametrize(("tokens", "top_k", "num_experts"), [(1, 1, 1), (1, 3, 8), (40, 2, 5), (30, 4, 60)])
def test_every_pair_is_in_a_tile_of_its_expert(tokens: int, top_k: int, num_experts: int, rows: int) -> None:
    draw = torch.Generator().manual_seed(tokens)
    chosen = torch.rand(tokens, num_experts, generator=draw).argsort(dim=1)[:, :top_k].int().contiguous()
    chosen[tokens // 2] = num_experts  # padding
    assert_tiled(chosen, num_experts, rows)
    assert_tiled(torch.zeros_like(chosen), num_experts, rows)
    assert_tiled(torch.full_like(chosen, num_experts), num_experts, rows)


def test_long_prompts_are_sorted_in_blocks() -> None:
    draw = torch.Generator().manual_seed(3)
    assert_tiled(torch.randint(0, 4, (FEW_PAIRS * 5, 1), generator=draw, dtype=torch.int32), 3, 128)


@pytest.mark.parametrize("rows", [1, 4, 16])
def test_no_step_needs_more_tiles_than_there_are(rows: int) -> None:
    for num_experts, num_pairs in itertools.product(range(1, 7), range(1, 60)):
        crowded = min(num_experts, num_pairs)  # one expert has what the others leave it
        worst = crowded - 1 + -(-(num_pairs - crowded + 1) // rows)
        assert most_tiles(num_pairs, num_experts, rows) == worst


def random_routing(seed: int) -> tuple[Tensor, Routing, Tensor, Tensor]:
    """A step: x, its routing, and the weights."""
    pick, draw = random.Random(seed), torch.Generator().manual_seed(seed)
    num_experts, hidden, intermediate = pick.randint(1, 9), pick.randint(1, 40), pick.randint(1, 20)
    top_k, tokens = pick.randint(1, min(4, num_experts)), pick.choice([1, 2, pick.randint(3, 12)])
    logits = torch.randn(tokens, num_experts, generator=draw)
    crowd = pick.choice(["", "one", "some are empty"])
    if crowd:
        logits[:, : 1 if crowd == "one" else top_k] += 100
    rule = RoutingRule(num_experts, top_k, renormalized=pick.random() < 0.5)
    x = torch.randn(tokens, hidden, generator=draw)
    gate_up = torch.randn(num_experts, 2 * intermediate, hidden, generator=draw)
    return x, route(logits, rule), gate_up, torch.randn(num_experts, hidden, intermediate, generator=draw)


def assert_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)


def check_random(seeds: range) -> None:
    for seed in seeds:
        x, routing, gate_up, down = random_routing(seed)
        expected = experts.multiply_experts(x, routing, gate_up, down)
        assert_close(multiply_experts(x, routing, gate_up.flatten(0, 1), down.flatten(0, 1), tilings=TILINGS), expected)


@pytest.mark.parametrize("first", one_in(10, range(0, 200, RANDOM)))
def test_random_routings_equal_the_reference(first: int) -> None:
    check_random(range(first, first + RANDOM))


@pytest.mark.parametrize("tilings", [*(tilings for _, tilings in BY_ROWS), MANY_ROWS, WIDE], ids=str)
def test_every_tiling_equals_the_reference(tilings: ExpertTilings) -> None:
    tokens, hidden, intermediate = 20, 130, 70
    x, rule = drawn(tokens, hidden), RoutingRule(3, 2, renormalized=True)
    gate_up, down = drawn(3, 2 * intermediate, hidden), drawn(3, hidden, intermediate)
    routing = route(drawn(tokens, 3), rule)
    assert_close(
        multiply_experts(x, routing, gate_up.flatten(0, 1), down.flatten(0, 1), tilings=tilings),
        experts.multiply_experts(x, routing, gate_up, down),
    )


def test_a_tokens_result_does_not_depend_on_the_others_or_on_padding() -> None:
    rule = RoutingRule(5, 2)
    x, logits = drawn(7, 24), drawn(7, 5)
    gate_up, down = drawn(5 * 24, 24), drawn(5 * 24, 12)
    alone = multiply_experts(x[:3], route(logits[:3], rule), gate_up, down, tilings=TILINGS)
    x[3:], kv_slots = torch.nan, torch.tensor([0, 1, 2, -1, -1, -1, -1])
    found = multiply_experts(x, route(logits, rule, kv_slots=kv_slots), gate_up, down, tilings=TILINGS)
    assert torch.equal(found[:3], alone)
    assert not found[3:].any()


def in_blocks(lines: int, inner: int) -> QuantizedWeight:
    """Blocks differ in size, so that a scale of another block is noticed."""
    draw = torch.Generator().manual_seed(lines + inner)
    scale = 2.0 ** torch.randint(-6, 1, (lines // BLOCK, -(-inner // BLOCK)), generator=draw)
    return QuantizedWeight("fp8", drawn(lines, inner).to(FP8), scale, inner)


def with_zeros(lines: int, inner: int) -> QuantizedWeight:
    """Groups of 32, so that the halves of what is multiplied together belong to two."""
    draw = torch.Generator().manual_seed(lines + inner)
    values = torch.randint(0, 16, (lines, inner), generator=draw, dtype=torch.uint8)
    zero = torch.randint(0, 16, (lines, inner // 32), generator=draw, dtype=torch.uint8)
    return packed_int4(values, torch.rand(lines, inner // 32, generator=draw), zero)


def as_read(x: Tensor, weight: QuantizedWeight) -> Tensor:
    """The values of activations that a product uses."""
    if weight.kind != "fp8":
        return x
    if not weight.in_blocks:
        narrow, factors = quantize_rows(x)
        return narrow.float() * factors[:, None]
    narrow, factors = quantize_groups(x)
    return narrow.float() * factors.t().repeat_interleave(BLOCK, dim=1)[:, : x.shape[1]]


def of_quantised(x: Tensor, routing: Routing, gate_up: QuantizedWeight, down: QuantizedWeight) -> Tensor:
    hidden = x.shape[1]
    first = dequantize(gate_up).view(-1, 2 * down.inner, hidden)
    second = dequantize(down).view(-1, hidden, down.inner)
    pairs, chosen = as_read(x, gate_up).repeat_interleave(routing.experts.shape[1], dim=0), routing.experts.flatten()
    gated = torch.stack([silu_and_mul(first[e] @ row) for row, e in zip(pairs, chosen.tolist(), strict=True)])
    gated = as_read(gated, down)
    results = torch.stack([second[e] @ row for row, e in zip(gated, chosen.tolist(), strict=True)])
    return (results.view(*routing.experts.shape, hidden) * routing.shares[..., None]).sum(dim=1)


MADE: dict[str, Callable[[int, int], QuantizedWeight]] = {
    "int8": lambda lines, inner: quantize(drawn(lines, inner), "int8"),
    "int4": lambda lines, inner: quantize(drawn(lines, inner), "int4"),
    "int4 with zeros": with_zeros,
    "fp8": lambda lines, inner: quantize(drawn(lines, inner), "fp8"),
    "fp8 in blocks": in_blocks,
}


@pytest.mark.parametrize("kind", MADE)
def test_quantised_experts_are_what_they_stand_for(kind: str) -> None:
    hidden, intermediate = (256, 128) if kind == "fp8 in blocks" else (192, 64)
    if kind in ("int8", "fp8"):
        hidden, intermediate = 70, 36
    tilings = ExpertTilings(MatmulTiling(4, 32, 64, 1, 1), MatmulTiling(4, 64, 64, 1, 1))
    x, routing = drawn(5, hidden) / 8, route(drawn(5, 3), RoutingRule(3, 2))
    gate_up, down = MADE[kind](3 * 2 * intermediate, hidden), MADE[kind](3 * hidden, intermediate)
    found = multiply_experts(x, routing, gate_up, down, tilings=tilings)
    expected = of_quantised(x, routing, gate_up, down)
    # A number between two of 8 bits may be rounded either way.
    tolerance = 1e-2 * float(expected.abs().max()) if kind.startswith("fp8") else 1e-3
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=tolerance)


def test_the_weight_of_an_expert_may_begin_further_than_32_bits_can_tell() -> None:
    """The memory between the first expert and the last one is never touched."""
    torch.use_deterministic_algorithms(False)  # so that no memory is filled
    num_experts, hidden, intermediate = 257, 2048, 4096

    def far(lines: int, inner: int) -> tuple[QuantizedWeight, Tensor]:
        one = quantize(drawn(lines, inner) / inner**0.5, "int8")
        data = torch.empty(num_experts * lines, inner, dtype=torch.int8)
        scale = torch.empty(num_experts * lines)
        data[:lines], data[-lines:], scale[:lines], scale[-lines:] = 0, one.data, 0.0, one.scale
        return QuantizedWeight("int8", data, scale, inner), dequantize(one)

    (gate_up, first), (down, second) = far(2 * intermediate, hidden), far(hidden, intermediate)
    assert down.data[:-hidden].numel() == 1 << 31
    x, logits = drawn(1, hidden).half(), torch.zeros(1, num_experts)
    logits[:, -1] = 1.0
    wide = MatmulTiling(2, 512, 1024, 1, 1)
    routing = route(logits, RoutingRule(num_experts, 1, renormalized=True))
    found = multiply_experts(x, routing, gate_up, down, tilings=ExpertTilings(wide, wide))
    expected = silu_and_mul(x.float() @ first.t()) @ second.t()
    torch.testing.assert_close(found.float(), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("tokens", "top_k", "num_experts", "rows"),
    [(1, 8, 128, 16), (64, 8, 128, 16), (128, 8, 128, 16), (256, 8, 128, 32), (511, 8, 128, 32), (512, 8, 128, 64),
     (4096, 8, 128, 128), (8, 2, 8, 16), (64, 2, 8, 32), (4096, 1, 8, 128)],
)  # fmt: skip
def test_tiles_have_as_many_rows_as_experts_do(tokens: int, top_k: int, num_experts: int, rows: int) -> None:
    weights: list[ExpertWeight] = [drawn(2, 2).half(), drawn(2, 2), quantize(drawn(2, 2), "int8")]
    for weight, memory in itertools.product(weights, (99 << 10, 227 << 10)):
        found = expert_tilings(tokens, top_k=top_k, num_experts=num_experts, weight=weight, shared_memory=memory)
        assert found.gate_up.rows == found.down.rows == rows
        if rows == MANY_ROWS.down.rows:
            assert found == (WIDE if weight is weights[0] and memory == 227 << 10 else MANY_ROWS)


def test_small_groups_take_fewer_columns_of_gate_and_up_before_hopper() -> None:
    int4 = quantize(drawn(2, 128), "int4")
    small = replace(int4, scale=drawn(2, 4).abs(), group=32)
    sizes = {"top_k": 8, "num_experts": 128}
    for weight, memory in itertools.product((int4, small), (99 << 10, 227 << 10)):
        for tokens, fixed in ((1, False), (512, False), (4096, False), (1, True)):
            found = expert_tilings(tokens, weight=weight, shared_memory=memory, fixed=fixed, **sizes)
            others = expert_tilings(tokens, weight=drawn(2, 2), shared_memory=memory, fixed=fixed, **sizes)
            is_narrow = weight is small and memory == 99 << 10 and found.gate_up.rows >= 64
            assert found.gate_up == (replace(others.gate_up, columns=32) if is_narrow else others.gate_up)
            assert found.down == others.down
            assert not fixed or others == FIXED


def test_no_tokens_need_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_products, "_expert_product", None)
    routing = route(drawn(0, 3), RoutingRule(3, 2))
    assert multiply_experts(drawn(0, 8), routing, drawn(3 * 8, 8), drawn(3 * 8, 4), tilings=FIXED).shape == (0, 8)


def mutant_of(module: ModuleType, old: str, new: str, folder: Path) -> ModuleType:
    """The module with another text in one place."""
    assert module.__file__ is not None
    text = Path(module.__file__).read_text()
    assert text.count(old) == 1
    path = folder / "mutant.py"
    path.write_text(text.replace(old, new))
    spec = spec_from_file_location("mutant", path)
    assert spec is not None
    assert spec.loader is not None
    mutant = module_from_spec(spec)
    spec.loader.exec_module(mutant)
    return mutant


Check = Callable[[], None]


def sorts_a_step() -> None:
    test_every_pair_is_in_a_tile_of_its_expert(40, 2, 5, 4)


def with_experts(kind: str) -> Check:
    return lambda: test_quantised_experts_are_what_they_stand_for(kind)


def routed(rule: RoutingRule) -> Check:
    return lambda: assert_routed(drawn(9, rule.num_experts), rule)


MUTANTS: list[tuple[ModuleType, str, str, Check]] = [
    (expert_choice, "share /= tl.sum(share)", "share /= 1.0", routed(RULES[1])),
    (expert_choice, "share *= scale", "share *= 1.0", routed(RULES[3])),
    (expert_choice, "merit += tl.max", "merit += 0.0 * tl.max", routed(RULES[6])),
    (expert_choice, "tl.static_range(TOP_GROUPS)", "tl.static_range(GROUPS)", routed(RULES[6])),
    (expert_tiles, "rest, -1, mask", "rest, 0, mask", sorts_a_step),
    (expert_tiles, "index < expert", "index < expert - 1", sorts_a_step),
    (expert_tiles, "mask=found < num_experts", "mask=found <= num_experts", sorts_a_step),
    (expert_tiles, "tl.load(loads + expert) + placed", "placed", sorts_a_step),
    (expert_tiles, "placed += tl.sum(is_own)", "placed += 0", lambda: test_long_prompts_are_sorted_in_blocks()),
    (expert_products, "pair // PAIRS_PER_ROW", "pair // (2 * PAIRS_PER_ROW)", lambda: check_random(range(3))),
    (expert_products, "line + COLUMNS, some_columns,", "line, some_columns,", lambda: check_random(range(3))),
    (expert_products, "mask=is_one & (at < HIDDEN)", "mask=at < HIDDEN",
     lambda: test_a_tokens_result_does_not_depend_on_the_others_or_on_padding()),
    (expert_products, "COLUMNS // BLOCK *", "0 *", with_experts("fp8 in blocks")),
    (expert_products, "first_line // BLOCK +", "0 +", with_experts("fp8 in blocks")),
    (expert_products, "(start + HALF) // GROUP", "start // GROUP", with_experts("int4 with zeros")),
]  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS, ids=[new for _, _, new, _ in MUTANTS])
def test_a_fault_is_noticed(
    mutant: tuple[ModuleType, str, str, Check], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, old, new, check = mutant
    check()
    made = mutant_of(module, old, new, tmp_path)
    for name in ("route", "ExpertTiles", "multiply_experts"):
        if hasattr(made, name):
            monkeypatch.setattr(sys.modules[__name__], name, getattr(made, name))
    with pytest.raises(AssertionError):
        check()
