"""GraniteForCausalLM: Llama with multipliers of embeddings, attention, residual stream and logits."""

from trunkline_worker.model.architectures.architecture import Architecture, read_head_dim, read_kv_heads
from trunkline_worker.model.architectures.config_keys import ConfigKeys
from trunkline_worker.model.architectures.decoder_spec import Multipliers
from trunkline_worker.model.checkpoint.entries import Entries
from trunkline_worker.model.families.llama import LLAMA

MOST_MULTIPLIER = 1e6


def _multipliers(config: Entries) -> Multipliers:
    embedding, attention, residual, logits = (
        config.positive(key, MOST_MULTIPLIER, default=1.0)
        for key in ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
    )
    return Multipliers(embedding, attention, residual, logits)


GRANITE = Architecture(
    name="GraniteForCausalLM",
    model_type="granite",
    keys=ConfigKeys(
        read={
            "attention_bias",
            "mlp_bias",
            "embedding_multiplier",
            "attention_multiplier",
            "residual_multiplier",
            "logits_scaling",
        },
        without_effect=LLAMA.keys.without_effect,
        neutral=LLAMA.keys.neutral,
    ),
    head_dim=lambda config, hidden, num_heads: read_head_dim(config, hidden // num_heads),
    num_kv_heads=lambda config, num_heads: read_kv_heads(config, num_heads, num_heads),
    layers=LLAMA.layers,
    multipliers=_multipliers,
)
