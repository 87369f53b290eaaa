"""Reads config.json into the spec of an encoder, by the rules of transformers 5."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trunkline_worker.model.architectures.architecture import MOST_HEADS, MOST_LAYERS
from trunkline_worker.model.architectures.config_keys import ConfigKeys, check_keys
from trunkline_worker.model.checkpoint.entries import Entries
from trunkline_worker.model.checkpoint.refusals import ModelError, shown
from trunkline_worker.model.config_json import MOST_HIDDEN, MOST_VOCAB
from trunkline_worker.model.encoders import bert, modernbert
from trunkline_worker.model.encoders.encoder_spec import EncoderSizes, EncoderSpec
from trunkline_worker.model.pooling.pooling_spec import PoolingSpec


@dataclass(frozen=True, slots=True)
class EncoderFamily:
    """How to read the config.json of encoders of one kind."""

    model_type: str
    keys: ConfigKeys
    spec: Callable[[Entries, str, EncoderSizes], EncoderSpec]


@dataclass(frozen=True, slots=True)
class PooledEncoder:
    """What loading must know of an encoder."""

    config: dict[str, Any]  # of config.json
    spec: EncoderSpec
    pooling: PoolingSpec

    @property
    def vocab_size(self) -> int:
        return self.spec.sizes.vocab_size


# By what `architectures` has before "Model" or "ForSequenceClassification".
FAMILIES = {
    "Bert": EncoderFamily("bert", bert.KEYS, bert.bert_spec),
    "Roberta": EncoderFamily("roberta", bert.KEYS, bert.bert_spec),
    "XLMRoberta": EncoderFamily("xlm-roberta", bert.KEYS, bert.bert_spec),
    "ModernBert": EncoderFamily("modernbert", modernbert.KEYS, modernbert.modernbert_spec),
}
ENDINGS = ("Model", "ForSequenceClassification", "ForMaskedLM")


def family_of(architecture: str) -> EncoderFamily | None:
    """Returns the family of an architecture, as `architectures` names it; None: it is no encoder."""
    for ending in ENDINGS:
        if architecture.endswith(ending):
            return FAMILIES.get(architecture.removesuffix(ending))
    return None


def parse_encoder(config: dict[str, Any], architecture: str, family: EncoderFamily) -> EncoderSpec:
    """Returns the spec that a config.json describes. Raises ModelError with the key that is missing, unknown, out of
    range or not supported."""
    entries = Entries(config)
    check_keys(config, architecture, family.keys)
    if entries.text("model_type") != family.model_type:
        raise ModelError(f"model_type {shown(config['model_type'])} contradicts architectures {architecture}")
    hidden = entries.integer("hidden_size", 1, MOST_HIDDEN)
    num_heads = entries.integer("num_attention_heads", 1, MOST_HEADS)
    if hidden % num_heads:
        raise ModelError(f"hidden_size {hidden} is not a multiple of num_attention_heads {num_heads}")
    sizes = EncoderSizes(
        vocab_size=entries.integer("vocab_size", 1, MOST_VOCAB),
        hidden=hidden,
        num_layers=entries.integer("num_hidden_layers", 1, MOST_LAYERS),
        num_heads=num_heads,
    )
    return family.spec(entries, architecture, sizes)
