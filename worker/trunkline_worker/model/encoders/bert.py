"""BERT, and RoBERTa and XLM-RoBERTa, which differ from it in where positions begin."""

from trunkline_worker.model.architectures.architecture import MOST_INTERMEDIATE
from trunkline_worker.model.architectures.config_keys import NONE, ConfigKeys
from trunkline_worker.model.architectures.decoder_spec import LinearSpec
from trunkline_worker.model.architectures.rope_scaling import MOST_CONTEXT
from trunkline_worker.model.checkpoint.entries import Entries
from trunkline_worker.model.checkpoint.refusals import ModelError
from trunkline_worker.model.encoders.encoder_spec import (
    ACTIVATIONS,
    EmbeddingSpec,
    EncoderLayerSpec,
    EncoderSizes,
    EncoderSpec,
)

MOST_TYPES = 1 << 10
LEAST_CONTEXT = 2
PREFIXES = {"bert": "bert.", "roberta": "roberta.", "xlm-roberta": "roberta."}  # by model_type
# Positions begin after the id of the padding token. The value is that id if the config has none.
AFTER_PADDING = {"roberta": 1, "xlm-roberta": 1}

KEYS = ConfigKeys(
    read={"layer_norm_eps", "type_vocab_size", "pad_token_id", "is_decoder"},
    without_effect={"attention_probs_dropout_prob", "directionality", "output_past"}
    # Sizes of a pooler that nothing uses.
    | {f"pooler_{name}" for name in ("fc_size", "num_attention_heads", "num_fc_layers", "size_per_head", "type")},
    neutral={"position_embedding_type": (None, "absolute"), "embedding_size": NONE},
)


def bert_spec(config: Entries, architecture: str, sizes: EncoderSizes) -> EncoderSpec:
    """Returns the spec of a config.json. Raises ModelError with the key."""
    model_type = config.text("model_type")
    if config.flag("is_decoder", False):
        raise config.refused("is_decoder", True, "false")
    first = 0
    if model_type in AFTER_PADDING:
        first = 1 + config.integer("pad_token_id", 0, sizes.vocab_size - 1, default=AFTER_PADDING[model_type])
    num_positions = config.integer("max_position_embeddings", LEAST_CONTEXT, MOST_CONTEXT)
    if num_positions - first < LEAST_CONTEXT:
        raise ModelError(f"max_position_embeddings {num_positions} leaves no position after the padding token's")
    hidden = sizes.hidden
    inner = config.integer("intermediate_size", 1, MOST_INTERMEDIATE)

    def product(name: str, rows: int, columns: int) -> LinearSpec:
        return LinearSpec(((name, rows),), columns, True, "out")

    qkv = tuple((f"attention.self.{name}", hidden) for name in ("query", "key", "value"))
    layer = EncoderLayerSpec(
        attention_norm="attention.output.LayerNorm",
        qkv=LinearSpec(qkv, hidden, True, "out"),
        output=product("attention.output.dense", hidden, hidden),
        rope=None,
        window=None,
        feed_forward_norm="output.LayerNorm",
        up=product("intermediate.dense", inner, hidden),
        down=product("output.dense", hidden, inner),
    )
    return EncoderSpec(
        architecture=architecture,
        prefix=PREFIXES[model_type],
        sizes=sizes,
        norm_eps=config.positive("layer_norm_eps", 1.0, default=1e-12),
        norm_bias=True,
        norms_first=False,
        activation=config.one_of("hidden_act", config.values.get("hidden_act", "gelu"), ACTIVATIONS),
        is_gated=False,
        embedding=EmbeddingSpec(
            words="embeddings.word_embeddings",
            norm="embeddings.LayerNorm",
            positions="embeddings.position_embeddings",
            num_positions=num_positions,
            first_position=first,
            types="embeddings.token_type_embeddings",
            num_types=config.integer("type_vocab_size", 1, MOST_TYPES, default=2),
        ),
        layers_at="encoder.layer.",
        layers=(layer,) * sizes.num_layers,
        final_norm=None,
        context_length=num_positions - first,
    )
