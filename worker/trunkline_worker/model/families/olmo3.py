"""Olmo3ForCausalLM: OLMo 2 with windows in most layers, whose rotary embedding is never scaled."""

from collections.abc import Iterator
from dataclasses import replace

from trunkline_worker.model.architectures.architecture import (
    DEFAULT_WINDOW,
    FULL,
    MOST_WINDOW,
    SLIDING,
    Architecture,
    LayerSizes,
    layer_windows,
)
from trunkline_worker.model.architectures.config_keys import ConfigKeys
from trunkline_worker.model.architectures.decoder_spec import LayerSpec
from trunkline_worker.model.architectures.rope_scaling import MOST_THETA, RopeRules, RopeSpec
from trunkline_worker.model.checkpoint.entries import Entries
from trunkline_worker.model.checkpoint.refusals import ModelError, shown
from trunkline_worker.model.families.olmo2 import OLMO2, layer

DEFAULT_THETA = 500_000.0
FULL_EVERY = 4  # layers, if layer_types is absent
ROPE_KINDS = ("default", "linear", "llama3", "yarn")


def _rope_of(config: Entries, kind: str) -> Entries:
    """Returns the entries of rope_parameters for a type of layers; none if they are absent."""
    if not config.has("rope_parameters"):
        return Entries({}, f"rope_parameters.{kind}.")
    ropes = config.object("rope_parameters")
    if unknown := sorted(ropes.values.keys() - {FULL, SLIDING}):
        raise ModelError(f"{ropes.within}{shown(unknown[0])[1:-1]} is not known: supported are {FULL} and {SLIDING}")
    return ropes.object(kind) if ropes.has(kind) else Entries({}, f"{ropes.within}{kind}.")


def _rope_config(config: Entries) -> Entries:
    """Returns the config with the rotary embedding of the layers without a window as that of all."""
    own = _rope_of(config, FULL).values
    if config.has("rope_parameters") and config.has("rope_scaling"):
        raise config.refused("rope_scaling", config.values["rope_scaling"], "null beside rope_parameters")
    left_out = {"rope_parameters", "original_max_position_embeddings"}  # of the latter, the object's counts alone
    kept = {key: value for key, value in config.values.items() if key not in left_out}
    return Entries(kept | ({"rope_parameters": own} if own else {}))


def _unscaled_theta(config: Entries) -> float:
    """Returns the base of the rotary embedding of layers with a window, which has no other settings."""
    sliding = _rope_of(config, SLIDING)
    for key in sorted(sliding.values.keys() - {"rope_type", "rope_theta"}):
        raise ModelError(f"{sliding.within}{shown(key)[1:-1]} is not known")
    if "rope_type" in sliding.values:
        sliding.one_of("rope_type", sliding.text("rope_type"), ("default",))
    if "rope_theta" not in sliding.values and "rope_theta" in config.values:
        # transformers reads it for the other layers only. Any other value would be a guess.
        config.one_of("rope_theta", config.values["rope_theta"], (DEFAULT_THETA,))
    return sliding.number("rope_theta", 1.0, MOST_THETA, default=DEFAULT_THETA)


def _windows(config: Entries, num_layers: int) -> list[int | None]:
    window = config.integer("sliding_window", 1, MOST_WINDOW, default=DEFAULT_WINDOW)
    if config.has("layer_types"):
        return layer_windows(config, num_layers, window)
    return [window if number % FULL_EVERY else None for number in range(1, num_layers + 1)]


def _layers(config: Entries, sizes: LayerSizes) -> Iterator[LayerSpec]:
    unscaled = replace(sizes, rope=RopeSpec(sizes.rope.width, _unscaled_theta(config)))
    for window in _windows(config, sizes.num_layers):
        yield layer(config, sizes if window is None else unscaled, window)


OLMO3 = Architecture(
    name="Olmo3ForCausalLM",
    model_type="olmo3",
    keys=ConfigKeys(
        read=OLMO2.keys.read | {"sliding_window"},
        without_effect=OLMO2.keys.without_effect,
        neutral={key: values for key, values in OLMO2.keys.neutral.items() if key != "sliding_window"},
    ),
    head_dim=OLMO2.head_dim,
    num_kv_heads=OLMO2.num_kv_heads,
    layers=_layers,
    rope=RopeRules(default_theta=DEFAULT_THETA, kinds=ROPE_KINDS),
    rope_config=_rope_config,
)
