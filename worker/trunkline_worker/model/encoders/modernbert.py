"""ModernBERT: rotary embedding, norms before each part, gated feed-forward parts, and windows in most layers."""

from trunkline_worker.model.architectures.architecture import (
    FULL,
    MOST_INTERMEDIATE,
    MOST_LAYERS,
    MOST_WINDOW,
    SLIDING,
)
from trunkline_worker.model.architectures.config_keys import ConfigKeys
from trunkline_worker.model.architectures.decoder_spec import LinearSpec
from trunkline_worker.model.architectures.rope_scaling import MOST_CONTEXT, MOST_THETA, RopeSpec
from trunkline_worker.model.checkpoint.entries import Entries
from trunkline_worker.model.checkpoint.refusals import ModelError
from trunkline_worker.model.encoders.encoder_spec import (
    ACTIVATIONS,
    EmbeddingSpec,
    EncoderLayerSpec,
    EncoderSizes,
    EncoderSpec,
)

# Kind of layer → the key of its base at the top level, and the base without one.
THETAS = {FULL: ("global_rope_theta", 160_000.0), SLIDING: ("local_rope_theta", 10_000.0)}

KEYS = ConfigKeys(
    read={key for key, _ in THETAS.values()}
    | {"hidden_activation", "norm_eps", "layer_norm_eps", "norm_bias", "attention_bias", "mlp_bias", "local_attention"}
    | {"global_attn_every_n_layers", "classifier_pooling", "classifier_bias", "classifier_activation"},
    without_effect={"mlp_dropout", "initializer_cutoff_factor", "deterministic_flash_attn", "reference_compile"}
    | {"decoder_bias", "sparse_prediction", "sparse_pred_ignore_index", "repad_logits_with_grad", "cls_token_id"}
    | {"position_embedding_type"},
)


def modernbert_spec(config: Entries, architecture: str, sizes: EncoderSizes) -> EncoderSpec:
    """Returns the spec of a config.json. Raises ModelError with the key."""
    if sizes.head_dim % 2:
        raise ModelError(f"head_dim {sizes.head_dim} is not supported: rotary embedding turns pairs")
    kinds = _layer_kinds(config, sizes.num_layers)
    ropes = {kind: RopeSpec(sizes.head_dim, _theta(config, kind)) for kind in THETAS}
    window = config.integer("local_attention", 2, MOST_WINDOW, default=128) // 2
    attention_bias, mlp_bias = config.flag("attention_bias", False), config.flag("mlp_bias", False)
    hidden, inner = sizes.hidden, config.integer("intermediate_size", 1, MOST_INTERMEDIATE)

    def layer(index: int, kind: str) -> EncoderLayerSpec:
        return EncoderLayerSpec(
            attention_norm="attn_norm" if index else None,  # the embedding is normalised already
            qkv=LinearSpec((("attn.Wqkv", 3 * hidden),), hidden, attention_bias, "out"),
            output=LinearSpec((("attn.Wo", hidden),), hidden, attention_bias, "in"),
            rope=ropes[kind],
            window=window if kind == SLIDING else None,
            feed_forward_norm="mlp_norm",
            up=LinearSpec((("mlp.Wi", 2 * inner),), hidden, mlp_bias, "out"),
            down=LinearSpec((("mlp.Wo", hidden),), inner, mlp_bias, "in"),
        )

    return EncoderSpec(
        architecture=architecture,
        prefix="model.",
        sizes=sizes,
        norm_eps=config.positive("norm_eps", 1.0, default=1e-5),
        norm_bias=config.flag("norm_bias", False),
        norms_first=True,
        activation=config.one_of("hidden_activation", config.values.get("hidden_activation", "gelu"), ACTIVATIONS),
        is_gated=True,
        embedding=EmbeddingSpec(words="embeddings.tok_embeddings", norm="embeddings.norm"),
        layers_at="layers.",
        layers=tuple(layer(index, kind) for index, kind in enumerate(kinds)),
        final_norm="final_norm",
        context_length=config.integer("max_position_embeddings", 2, MOST_CONTEXT),
    )


def _layer_kinds(config: Entries, num_layers: int) -> list[str]:
    if not config.has("layer_types"):
        every = config.integer("global_attn_every_n_layers", 1, MOST_LAYERS, default=3)
        return [SLIDING if index % every else FULL for index in range(num_layers)]
    kinds = config.values["layer_types"]
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise config.refused("layer_types", kinds, f"a list of {num_layers}, as many as num_hidden_layers")
    return [config.one_of("layer_types", kind, tuple(THETAS)) for kind in kinds]


def _theta(config: Entries, kind: str) -> float:
    """Returns the base of a kind of layers. Scaling of rotary embeddings is refused."""
    key, default = THETAS[kind]
    if config.has("rope_scaling"):
        raise config.refused("rope_scaling", config.values["rope_scaling"], "null")
    if config.has("rope_parameters") and config.object("rope_parameters").has(kind):
        rope = config.object("rope_parameters").object(kind)
        if rope.values.get("rope_type", "default") != "default":
            raise rope.refused("rope_type", rope.values["rope_type"], "default")
        if rope.has("rope_theta"):
            return rope.number("rope_theta", 1.0, MOST_THETA)
    return config.number(key, 1.0, MOST_THETA, default=default)
