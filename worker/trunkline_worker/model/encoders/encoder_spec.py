"""What an encoder computes, as data: its embeddings, layers and norms, and the names of their tensors.

Names of tensors are relative to the encoder, and those of a layer to the layer: checkpoints with a head put a prefix
before all of them.
"""

from dataclasses import dataclass

from trunkline_worker.model.architectures.decoder_spec import LinearSpec
from trunkline_worker.model.architectures.rope_scaling import RopeSpec

ACTIVATIONS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu")  # by their names in config.json


@dataclass(frozen=True, slots=True)
class EncoderSizes:
    """What every encoder has."""

    vocab_size: int
    hidden: int
    num_layers: int
    num_heads: int

    @property
    def head_dim(self) -> int:
        return self.hidden // self.num_heads


@dataclass(frozen=True, slots=True)
class EmbeddingSpec:
    """What is added up for a token, and then normalised. A table that is None does not exist."""

    words: str  # [vocab, hidden]
    norm: str
    positions: str | None = None  # [num_positions, hidden]
    num_positions: int = 0
    first_position: int = 0  # row of a text's first token
    types: str | None = None  # [num_types, hidden]: of the segments of a pair
    num_types: int = 0


@dataclass(frozen=True, slots=True)
class EncoderLayerSpec:
    """A layer: attention, then a feed-forward part. Each adds its result to the residual stream."""

    attention_norm: str | None
    qkv: LinearSpec
    output: LinearSpec
    rope: RopeSpec | None
    window: int | None  # positions that a query sees on each side; None: all
    feed_forward_norm: str
    up: LinearSpec  # where layers are gated: first what is activated, then what that is multiplied by
    down: LinearSpec


@dataclass(frozen=True, slots=True)
class EncoderSpec:
    """An encoder of one architecture."""

    architecture: str
    prefix: str  # before the names of all tensors in checkpoints with a head
    sizes: EncoderSizes
    norm_eps: float
    norm_bias: bool
    norms_first: bool  # a part normalises its input; else the residual stream is normalised after each part
    activation: str  # one of ACTIVATIONS
    is_gated: bool
    embedding: EmbeddingSpec
    layers_at: str  # before the number of a layer
    layers: tuple[EncoderLayerSpec, ...]
    final_norm: str | None
    context_length: int

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        """The different rotary embeddings of the layers."""
        return tuple(dict.fromkeys(layer.rope for layer in self.layers if layer.rope is not None))
