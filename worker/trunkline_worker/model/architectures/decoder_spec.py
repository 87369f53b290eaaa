"""What a decoder computes, as data: its layers, their matrix products and norms, and the names of their tensors.

Loading, the decoders, the memory budget, the floor of a step and the simulation of steps all read these specs. Names of
tensors are relative to their layer. Layers that are alike have equal specs.
"""

from dataclasses import dataclass
from typing import Literal

from trunkline_kernels.routing_rule import RoutingRule
from trunkline_worker.model.architectures.rope_scaling import RopeSpec


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """A matrix product. Its weight [out, in] has parts, one below the other, each of which is a tensor of a checkpoint.

    shard: the axis along which tensor parallelism divides each part's weight. A slice of "out" gives some columns of
    the result, a slice of "in" a summand of it.
    """

    parts: tuple[tuple[str, int], ...]  # name, without ".weight" or ".bias", and rows
    inner: int
    bias: bool
    shard: Literal["out", "in"]

    @property
    def rows(self) -> list[int]:
        """Rows of each part."""
        return [rows for _, rows in self.parts]

    @property
    def columns(self) -> int:
        """Columns of the result."""
        return sum(self.rows)

    @property
    def num_params(self) -> int:
        return self.columns * self.inner


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Attention with rotary embedding, over all positions or a window of them. Its heads are those of DecoderSpec."""

    norm: str | None  # of its input; None: none
    qkv: LinearSpec  # queries, keys, values
    query_norm: str | None
    key_norm: str | None
    rope: RopeSpec
    window: int | None  # positions that a query sees, including its own; None: all
    output: LinearSpec
    post_norm: str | None  # of its result, before that is added to the residual stream
    # Over what query_norm and key_norm take the root mean square. Under tensor parallelism, that of all heads needs a
    # sum over devices.
    qk_norm_span: Literal["head", "all heads"] = "head"


@dataclass(frozen=True, slots=True)
class GatedSpec:
    """A feed-forward part: down(silu(gate(x)) * up(x))."""

    norm: str | None  # of its input
    gate_up: LinearSpec
    down: LinearSpec
    post_norm: str | None  # of its result


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """A feed-forward part of several experts, each of which is like a GatedSpec. A router chooses some for each token.

    A product has the parts of all experts, one expert below the other: gate and up of the first one, then those of the
    second one. So weights of experts are stored, read and quantised like others.
    """

    norm: str | None  # of its input
    router: LinearSpec  # a column for each expert; never quantised
    rule: RoutingRule
    gate_up: LinearSpec
    down: LinearSpec
    post_norm: str | None  # of its result
    shared: GatedSpec | None = None  # an expert that every token uses; it has no norms
    shared_gate: LinearSpec | None = None  # one column, of whose sigmoid its result is multiplied; None: it is not


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """A layer: two parts, each of which adds its result to the residual stream."""

    attention: AttentionSpec
    feed_forward: GatedSpec | ExpertsSpec

    @property
    def products(self) -> tuple[LinearSpec, ...]:
        """Those of attention and feed-forward part, in the order in which a token goes through them, and then those of
        a shared expert. Routers and gates are not among them."""
        fed = self.feed_forward
        shared = fed.shared if isinstance(fed, ExpertsSpec) else None
        others = () if shared is None else (shared.gate_up, shared.down)
        return self.attention.qkv, self.attention.output, fed.gate_up, fed.down, *others


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """A decoder: an embedding, layers, a norm, and a head. All layers have the same heads, because blocks of the KV
    cache do."""

    architecture: str
    vocab_size: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    layers: tuple[LayerSpec, ...]
    context_length: int  # default, without --context-length
    most_context: int  # maximum of --context-length
    tie_word_embeddings: bool
    dtype: str | None  # as the config names it; None: the config has none

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer."""
        return tuple(layer.attention.window for layer in self.layers)

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        """The different rotary embeddings of the layers."""
        return tuple(dict.fromkeys(layer.attention.rope for layer in self.layers))

    @property
    def layer_params(self) -> int:
        """Parameters of the matrices of all layers, without routers."""
        return sum(product.num_params for layer in self.layers for product in layer.products)

    @property
    def expert_params(self) -> int:
        """Those of them that experts have, of which a token uses some."""
        parts = (layer.feed_forward for layer in self.layers)
        return sum(part.gate_up.num_params + part.down.num_params for part in parts if isinstance(part, ExpertsSpec))

    @property
    def token_params(self) -> int:
        """Those of them that one token is multiplied by."""
        rule = self.routing
        if rule is None:
            return self.layer_params
        return self.layer_params - self.expert_params * (rule.num_experts - rule.top_k) // rule.num_experts

    @property
    def routing(self) -> RoutingRule | None:
        """How experts are chosen, the same in all layers that have some; None: no layer has."""
        parts = (layer.feed_forward for layer in self.layers)
        return next((part.rule for part in parts if isinstance(part, ExpertsSpec)), None)

    @property
    def head_params(self) -> int:
        return self.vocab_size * self.hidden_size
