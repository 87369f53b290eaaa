"""The rules of routing against the routers of transformers, ties among them."""

from typing import Any

import pytest
import torch
from torch import Tensor

from trunkline_kernels.expert_routing import Routing, route
from trunkline_kernels.routing_rule import RoutingRule

NUM_EXPERTS, TOP_K = 16, 4
TOKENS = 200


def config_of(family: str, **changes: Any) -> Any:
    import transformers

    sizes = {"hidden_size": NUM_EXPERTS, "num_experts_per_tok": TOP_K, "num_hidden_layers": 1}
    return getattr(transformers, f"{family}Config")(**sizes, **changes)


def their_routing(router: Any, logits: Tensor) -> Routing:
    """What a router of transformers makes of logits: its weight is the identity."""
    with torch.no_grad():
        router.weight.copy_(torch.eye(NUM_EXPERTS))
        _, shares, experts = router(logits)
    return Routing(experts, shares)


def check(found: Routing, theirs: Routing) -> None:
    """Each token has the same experts with the same shares; some routers of transformers do not sort them."""
    ours, order = found.experts.sort(dim=1)
    expected, their_order = theirs.experts.sort(dim=1)
    assert torch.equal(ours, expected)
    torch.testing.assert_close(found.shares.gather(1, order), theirs.shares.gather(1, their_order))


def logits() -> Tensor:
    return torch.randn(TOKENS, NUM_EXPERTS, generator=torch.Generator().manual_seed(7)) * 2


@pytest.mark.parametrize("renormalized", [False, True])
def test_softmax_as_in_qwen3_moe_and_olmoe(renormalized: bool) -> None:
    from transformers.models.olmoe.modeling_olmoe import OlmoeTopKRouter
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    for family, router in (("Qwen3Moe", Qwen3MoeTopKRouter), ("Olmoe", OlmoeTopKRouter)):
        config = config_of(family, num_experts=NUM_EXPERTS, norm_topk_prob=renormalized)
        found = route(logits(), RoutingRule(NUM_EXPERTS, TOP_K, renormalized=renormalized))
        check(found, their_routing(router(config), logits()))


def test_softmax_of_the_chosen_logits_as_in_mixtral_and_gpt_oss() -> None:
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
    from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter

    for family, router in (("Mixtral", MixtralTopKRouter), ("GptOss", GptOssTopKRouter)):
        config = config_of(family, num_local_experts=NUM_EXPERTS)
        found = route(logits(), RoutingRule(NUM_EXPERTS, TOP_K, renormalized=True))
        check(found, their_routing(router(config), logits()))


@pytest.mark.parametrize("renormalized", [False, True])
@pytest.mark.parametrize(("num_groups", "top_groups"), [(1, 1), (4, 2), (4, 1), (8, 3)])
def test_sigmoid_with_groups_and_a_bias_as_in_deepseek(renormalized: bool, num_groups: int, top_groups: int) -> None:
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

    top_k = min(TOP_K, NUM_EXPERTS // num_groups * top_groups)
    config = config_of(
        "DeepseekV3", n_routed_experts=NUM_EXPERTS, n_group=num_groups, topk_group=top_groups,
        norm_topk_prob=renormalized, routed_scaling_factor=2.5,
    )  # fmt: skip
    config.num_experts_per_tok = top_k
    router = DeepseekV3TopkRouter(config)
    bias = torch.randn(NUM_EXPERTS, generator=torch.Generator().manual_seed(8))
    router.e_score_correction_bias.copy_(bias)
    rule = RoutingRule(NUM_EXPERTS, top_k, "sigmoid", renormalized, 2.5, num_groups, top_groups)
    check(route(logits(), rule, bias), their_routing(router, logits()))


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_of_equal_scores_the_expert_with_the_lower_index_is_better(scores: Any) -> None:
    equal = torch.tensor([[1.0, 3.0, 1.0, 3.0, 1.0, 0.0], [2.0] * 6, [0.0, 0.0, 5.0, 5.0, 5.0, 5.0]])
    found = route(equal, RoutingRule(6, 3, scores))
    assert found.experts.tolist() == [[1, 3, 0], [0, 1, 2], [2, 3, 4]]
    in_groups = route(equal, RoutingRule(6, 2, scores, num_groups=3, top_groups=1))
    assert in_groups.experts.tolist() == [[1, 0], [0, 1], [2, 3]]
