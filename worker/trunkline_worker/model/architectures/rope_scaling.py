"""Parses the rotary embedding of config.json: base, scaling, and the context lengths that follow from them.

The rules are those of transformers 5.23: if both are present, `rope_scaling` replaces all of `rope_parameters`. If the
remaining object has no base, the top level's is used. An `original_max_position_embeddings` at the top level takes
precedence over one in the object.
"""

import math
from dataclasses import dataclass

from trunkline_worker.model.checkpoint.entries import Entries
from trunkline_worker.model.checkpoint.refusals import ModelError, shown

MOST_CONTEXT = 1 << 24  # tokens; also the bound of --context-length
MOST_THETA = 1e15
MOST_FACTOR = 1e6

# kind → keys in addition to _KEYS_OF_ALL. A key of another kind is refused, because its author expected an effect.
_KEYS: dict[str, set[str]] = {
    "default": set(),
    "linear": {"factor"},
    "dynamic": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {
        "factor",
        "attention_factor",
        "attn_factor",
        "mscale",
        "mscale_all_dim",
        "beta_fast",
        "beta_slow",
        "truncate",
        "original_max_position_embeddings",
    },
    "longrope": {"factor", "attention_factor", "short_factor", "long_factor", "original_max_position_embeddings"},
}
_KEYS_OF_ALL = {
    "rope_type",
    "type",
    "rope_theta",
    "partial_rotary_factor",
    "finetuned",  # a note of YaRN's authors: whether the model was trained with the scaling
}
ROPE_KINDS = tuple(_KEYS)
OLD_NAMES = {"su": "longrope"}


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """A rotary embedding, of one of the kinds of Hugging Face's `rope_scaling`. rotary_tables() implements them."""

    width: int  # elements of a head that are rotated: the first ones
    theta: float
    kind: str = "default"
    factor: float = 1.0  # linear, dynamic, llama3, yarn
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    original_context: int = 8192  # llama3, yarn, longrope: tokens in training, before the context was extended
    trained_context: int = 8192  # dynamic: context length in tokens up to which nothing is scaled
    attention_factor: float = 1.0  # yarn, longrope: multiplies every cosine and sine
    beta_fast: float = 32.0  # yarn: rotations within original_context above which a wave is kept
    beta_slow: float = 1.0  # yarn: rotations below which it is stretched by the whole factor
    truncate: bool = True  # yarn: round the bounds of the blend to whole dimensions
    short_factors: tuple[float, ...] = ()  # longrope: a divisor for each frequency
    long_factors: tuple[float, ...] = ()  # longrope

    def uses_long_factors(self, context_length: int) -> bool:
        """Whether longrope uses the long factors, for every sequence, in a worker with this context length."""
        return context_length > self.original_context

    def depends_on(self, context_length: int) -> str:
        """Returns how logits depend on the served context length, for the fingerprint; "" if they do not."""
        if self.kind == "longrope":
            return "long factors" if self.uses_long_factors(context_length) else "short factors"
        if self.kind == "dynamic" and context_length > self.trained_context:
            return f"scaled for {context_length}"
        return ""


@dataclass(frozen=True, slots=True)
class RopeRules:
    """What an architecture makes of the keys."""

    default_theta: float = 10_000.0
    kinds: tuple[str, ...] = ROPE_KINDS
    is_partial: bool = False  # partial_rotary_factor says which share of a head is rotated; else, all of it is
    default_original: int | None = None  # of the top level's original_max_position_embeddings, if that always applies


USUAL_ROPE = RopeRules()


@dataclass(frozen=True, slots=True)
class ContextLengths:
    """Most tokens of prompt and output together."""

    served: int  # default, without --context-length
    most: int  # maximum of --context-length


def parse_rope(config: Entries, head_dim: int, rules: RopeRules) -> tuple[RopeSpec, ContextLengths]:
    """Returns the rotary embedding and the context lengths that it allows. Raises ModelError with the key.

    - yarn serves `factor` times the original context, as vLLM does: some checkpoints have max_position_embeddings
      extended already, others not.
    - longrope serves the original context with the short factors, as vLLM does. --context-length may go up to
      max_position_embeddings; past the original context the long factors are used.
    - linear and dynamic serve max_position_embeddings. --context-length may go up to `factor` times that, because some
      checkpoints have max_position_embeddings extended already, others not.
    - default and llama3 serve max_position_embeddings.
    """
    trained = config.integer("max_position_embeddings", 2, MOST_CONTEXT)
    scaling = _scaling(config, rules)
    theta = _theta(config, scaling, rules)
    kind = _kind(scaling, rules.kinds)
    for key in sorted(scaling.values.keys() - _KEYS_OF_ALL - _KEYS[kind]):
        if scaling.values[key] is not None:
            raise ModelError(f"{scaling.within}{shown(key)[1:-1]} is not known for RoPE scaling {kind}")
    width = _width(config, scaling, head_dim, is_partial=rules.is_partial)
    same = ContextLengths(trained, trained)
    if kind == "default":
        return RopeSpec(width, theta), same
    if kind in ("linear", "dynamic"):
        factor = scaling.positive("factor", MOST_FACTOR)
        if kind == "dynamic" and width < 4:
            raise ModelError(f"RoPE scaling dynamic needs a head_dim of 4 or more, not {width}")
        most = max(trained, min(int(trained * factor), MOST_CONTEXT))
        return RopeSpec(width, theta, kind, factor=factor, trained_context=trained), ContextLengths(trained, most)
    # If the top level has it, transformers and vLLM use that value.
    is_on_top = "original_max_position_embeddings" in config.values or rules.default_original is not None
    original = (config if is_on_top else scaling).integer(
        "original_max_position_embeddings", 2, MOST_CONTEXT, default=rules.default_original or trained
    )
    if kind == "llama3":
        return _llama3(width, theta, scaling, original), same
    if kind == "yarn":
        rope = _yarn(width, theta, scaling, original, trained)
        length = int(original * rope.factor)
        if not 2 <= length <= MOST_CONTEXT:
            raise scaling.refused(
                "factor", rope.factor, f"one that extends {original} tokens to at most {MOST_CONTEXT}"
            )
        return rope, ContextLengths(length, length)
    return _longrope(width, theta, scaling, original, trained), ContextLengths(min(original, trained), trained)


def _width(config: Entries, scaling: Entries, head_dim: int, *, is_partial: bool) -> int:
    """Returns how many elements of a head are rotated."""
    key = "partial_rotary_factor"
    if not is_partial:  # config_keys.py checks the top level
        if scaling.values.get(key, 1) != 1:
            raise scaling.refused(key, scaling.values[key], "1")
        return head_dim
    where = scaling if key in scaling.values else config
    share = where.positive(key, 1.0, default=1.0)
    width = int(head_dim * share)
    if width < 2 or width % 2:
        raise where.refused(key, share, f"one that rotates an even number of a head's {head_dim} elements, not {width}")
    return width


def _scaling(config: Entries, rules: RopeRules) -> Entries:
    """Returns the object that applies, which may be empty."""
    given = {key: config.object(key) for key in ("rope_scaling", "rope_parameters") if config.has(key)}
    chosen = next((entries for entries in given.values() if entries.values), Entries({}, "rope_scaling."))
    other = given.get("rope_parameters", chosen)
    if chosen is not other and other.has("rope_theta") and other.values["rope_theta"] != _theta(config, chosen, rules):
        raise ModelError(
            "rope_scaling takes precedence over rope_parameters, but lacks their rope_theta "
            f"{shown(other.values['rope_theta'])}: add it to rope_scaling"
        )
    return chosen


def _theta(config: Entries, scaling: Entries, rules: RopeRules) -> float:
    where = scaling if "rope_theta" in scaling.values else config
    return where.number("rope_theta", 1.0, MOST_THETA, default=rules.default_theta)


def _kind(scaling: Entries, kinds: tuple[str, ...]) -> str:
    named = [scaling.text(key) for key in ("rope_type", "type") if key in scaling.values]
    found = {OLD_NAMES.get(name, name) for name in named} or {"default"}
    if len(found) > 1:
        raise ModelError(
            f"{scaling.within}rope_type {shown(named[0])} contradicts {scaling.within}type {shown(named[1])}"
        )
    (kind,) = found
    if kind not in kinds:
        raise ModelError(f"RoPE scaling {shown(kind)} is not supported; supported: {', '.join(kinds)}")
    return kind


def _llama3(width: int, theta: float, scaling: Entries, original: int) -> RopeSpec:
    low = scaling.positive("low_freq_factor", MOST_FACTOR)
    high = scaling.positive("high_freq_factor", MOST_FACTOR)
    if high <= low:
        raise scaling.refused("high_freq_factor", high, f"more than low_freq_factor {low:g}")
    return RopeSpec(
        width,
        theta,
        "llama3",
        factor=scaling.positive("factor", MOST_FACTOR),
        low_freq_factor=low,
        high_freq_factor=high,
        original_context=original,
    )


def _yarn(width: int, theta: float, scaling: Entries, original: int, trained: int) -> RopeSpec:
    if theta <= 1:
        raise ModelError(f"RoPE scaling yarn needs a rope_theta above 1, not {theta:g}")
    factor = _factor(scaling, original, trained, required=True)
    if scaling.has("attention_factor"):
        attention_factor = scaling.positive("attention_factor", MOST_FACTOR)
    else:
        mscale, mscale_all = (
            scaling.number(key, 0.0, MOST_FACTOR) if scaling.has(key) else 0.0 for key in ("mscale", "mscale_all_dim")
        )
        attention_factor = _mscale(factor, 1.0)
        if mscale and mscale_all:
            attention_factor = _mscale(factor, mscale) / _mscale(factor, mscale_all)
    if scaling.has("attn_factor"):
        # DeepSeek-R1-0528-Qwen3-8B has it, to make the product 1. vLLM multiplies; transformers ignores the key.
        attention_factor *= scaling.positive("attn_factor", MOST_FACTOR)
    # 0 and null mean the defaults, as in transformers.
    fast, slow = (
        (scaling.number(key, 0.0, MOST_FACTOR) if scaling.has(key) else 0.0) or default
        for key, default in (("beta_fast", 32.0), ("beta_slow", 1.0))
    )
    return RopeSpec(
        width,
        theta,
        "yarn",
        factor=factor,
        original_context=original,
        attention_factor=attention_factor,
        beta_fast=fast,
        beta_slow=slow,
        truncate=scaling.flag("truncate", True),
    )


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _longrope(width: int, theta: float, scaling: Entries, original: int, trained: int) -> RopeSpec:
    factor = _factor(scaling, original, trained, required=False)
    attention_factor = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    if scaling.has("attention_factor"):
        attention_factor = scaling.positive("attention_factor", MOST_FACTOR)
    return RopeSpec(
        width,
        theta,
        "longrope",
        factor=factor,
        original_context=original,
        attention_factor=attention_factor,
        short_factors=scaling.positives("short_factor", width // 2, MOST_FACTOR),
        long_factors=scaling.positives("long_factor", width // 2, MOST_FACTOR),
    )


def _factor(scaling: Entries, original: int, trained: int, *, required: bool) -> float:
    """Returns the factor. As in transformers, null means max_position_embeddings / original context."""
    if scaling.has("factor") or (required and "factor" not in scaling.values):
        return scaling.positive("factor", MOST_FACTOR)
    return trained / original
