"""The C kernels of experts against the references, on routings of every shape."""

import math
import random
import threading

import pytest
import torch
from torch import Tensor

from trunkline_kernels.cpu.library import library
from trunkline_kernels.cpu.packed_experts import PackedExperts
from trunkline_kernels.cpu.packed_linear import QUANTIZED_BITS, PackedLinear
from trunkline_kernels.expert_routing import route
from trunkline_kernels.experts import multiply_experts
from trunkline_kernels.quantized_weight import QuantizedWeight, dequantize, quantize
from trunkline_kernels.routing_rule import RoutingRule
from trunkline_worker.model.architectures.architecture import MOST_EXPERTS

DTYPES = [torch.float32, torch.bfloat16]


def random_rule(draw: random.Random) -> RoutingRule:
    num_experts = draw.choice((1, 2, 5, 8, 33, 64))
    return RoutingRule(
        num_experts,
        draw.randint(1, min(num_experts, 8)),
        renormalized=draw.random() < 0.5,
        scale=draw.choice((1.0, 2.5)),
    )


def logits_of(kind: str, num_tokens: int, num_experts: int) -> Tensor:
    """Router logits: random ones, many equal ones, or those of tokens that all choose the same experts."""
    if kind == "one takes all":
        return torch.randn(num_experts).expand(num_tokens, -1).contiguous()
    logits = torch.randn(num_tokens, num_experts) * 3
    return logits.round() if kind == "ties" else logits


def experts_of(rule: RoutingRule, hidden: int, intermediate: int) -> tuple[Tensor, Tensor]:
    gate_up = torch.randn(rule.num_experts, 2 * intermediate, hidden) / hidden**0.5
    return gate_up, torch.randn(rule.num_experts, hidden, intermediate) / intermediate**0.5


def packed(rule: RoutingRule, gate_up: list[Tensor], down: list[Tensor], dtype: torch.dtype) -> PackedExperts:
    kernels = library(dtype)
    assert kernels is not None
    return PackedExperts(
        kernels, rule, *([PackedLinear(kernels, each, None, dtype) for each in part] for part in (gate_up, down))
    )


@pytest.mark.parametrize("kind", ["random", "ties", "one takes all"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_results_equal_the_reference_on_random_routings(dtype: torch.dtype, kind: str) -> None:
    draw = random.Random(kind)
    torch.manual_seed(1)
    for _ in range(40):
        rule = random_rule(draw)
        hidden, intermediate = draw.choice((1, 7, 24, 64)), draw.choice((1, 5, 16, 40))
        num_tokens = draw.choice((1, 2, 7, 16, 61))
        gate_up, down = (each.to(dtype) for each in experts_of(rule, hidden, intermediate))
        x = torch.randn(num_tokens, hidden).to(dtype)
        logits = logits_of(kind, num_tokens, rule.num_experts).to(dtype)
        experts = packed(rule, list(gate_up), list(down), dtype)
        routing = route(logits.float(), rule)
        found = experts.route(logits)
        assert torch.equal(found.experts, routing.experts), rule
        torch.testing.assert_close(found.shares, routing.shares, atol=1e-6, rtol=1e-5)
        expected = multiply_experts(x, routing, gate_up, down)
        tolerance = 1e-5 if dtype is torch.float32 else 4e-2
        loads, num_padding = torch.full([rule.num_experts], 2), draw.randrange(num_tokens + 1)
        result = experts.multiply(x, logits, loads=loads, num_padding=num_padding)
        counted = routing.experts[: num_tokens - num_padding].flatten()
        assert torch.equal(loads - 2, torch.bincount(counted, minlength=rule.num_experts)), rule
        assert result.dtype is dtype
        torch.testing.assert_close(result, expected, atol=tolerance * rule.scale, rtol=tolerance)


@pytest.mark.parametrize(
    "rule", [RoutingRule(16, 3, "sigmoid", True, 2.5, 4, 2), RoutingRule(5, 2, "sigmoid")], ids=str
)
def test_rules_without_a_kernel_of_their_own_equal_the_reference(rule: RoutingRule) -> None:
    torch.manual_seed(2)
    gate_up, down = experts_of(rule, 24, 16)
    x, logits = torch.randn(9, 24), torch.randn(9, rule.num_experts)
    expected = multiply_experts(x, route(logits, rule), gate_up, down)
    result = packed(rule, list(gate_up), list(down), torch.float32).multiply(x, logits)
    torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("quantization", [None, *QUANTIZED_BITS])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tokens_bits_do_not_depend_on_the_other_tokens(dtype: torch.dtype, quantization: str | None) -> None:
    torch.manual_seed(3)
    rule, hidden, intermediate, num_tokens = RoutingRule(8, 3, renormalized=True), 128, 64, 150
    plain = experts_of(rule, hidden, intermediate)
    kernels = library(dtype)
    stored = library(dtype, bits=QUANTIZED_BITS[quantization]) if quantization else kernels
    assert kernels is not None
    assert stored is not None
    kept: list[list[Tensor | QuantizedWeight]] = [
        [quantize(each, quantization) if quantization else each.to(dtype) for each in part] for part in plain
    ]
    gate_up, down = ([PackedLinear(stored, each, None, dtype) for each in part] for part in kept)
    experts = PackedExperts(kernels, rule, gate_up, down)
    x, logits = torch.randn(num_tokens, hidden).to(dtype), torch.randn(num_tokens, rule.num_experts).to(dtype)
    logits[:, 0] += 2  # most tokens choose it: it has several tiles of rows
    together = experts.multiply(x, logits)
    values = [
        torch.stack([dequantize(each).to(dtype) if isinstance(each, QuantizedWeight) else each for each in part])
        for part in kept
    ]
    expected = multiply_experts(x, route(logits.float(), rule), *values)
    tolerance = 1e-5 if dtype is torch.float32 else 4e-2
    torch.testing.assert_close(together, expected, atol=tolerance, rtol=tolerance)
    for rows in (slice(0, 1), slice(70, 71), slice(3, 11), slice(100, 150), slice(0, 150, 7)):
        alone = experts.multiply(x[rows].contiguous(), logits[rows].contiguous())
        assert torch.equal(alone, together[rows])
    assert experts.multiply(x[:0], logits[:0]).shape == (0, hidden)


def test_the_most_experts_of_a_model_fit_a_stack_of_one_mebibyte() -> None:
    torch.manual_seed(6)
    rule, num_tokens = RoutingRule(MOST_EXPERTS, 8), MOST_EXPERTS // 8
    gate_up, down = experts_of(rule, 2, 1)
    experts = packed(rule, list(gate_up), list(down), torch.float32)
    x, logits = torch.randn(num_tokens, 2), torch.zeros(num_tokens, MOST_EXPERTS)
    logits.scatter_(1, torch.arange(MOST_EXPERTS).view(num_tokens, 8), 30.0)  # each expert has a token
    found: list[Tensor] = []
    before = threading.stack_size(1 << 20)
    try:
        thread = threading.Thread(target=lambda: found.append(experts.multiply(x, logits)))
        thread.start()
        thread.join()
    finally:
        threading.stack_size(before)
    torch.testing.assert_close(found[0], multiply_experts(x, route(logits, rule), gate_up, down), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_token_that_is_not_finite_spoils_no_other(value: float) -> None:
    torch.manual_seed(4)
    rule = RoutingRule(6, 2)
    gate_up, down = experts_of(rule, 16, 8)
    experts = packed(rule, list(gate_up), list(down), torch.float32)
    x, logits = torch.randn(5, 16), torch.randn(5, 6)
    expected = experts.multiply(x, logits)
    x[2], logits[2] = value, value
    result = experts.multiply(x, logits)
    assert result[2].isnan().all()
    assert torch.equal(result[[0, 1, 3, 4]], expected[[0, 1, 3, 4]])


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_result_of_a_shared_expert_is_added(dtype: torch.dtype, gated: bool) -> None:
    kernels = library(dtype)
    assert kernels is not None
    torch.manual_seed(5)
    x, out, gate = (torch.randn(*shape).to(dtype) for shape in ((17, 33), (17, 33), (17, 1)))
    expected = out + (x * gate.sigmoid() if gated else x)
    kernels.add_gated(x.data_ptr(), gate.data_ptr() if gated else None, out.data_ptr(), 17, 33)
    tolerance = 1e-6 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)
