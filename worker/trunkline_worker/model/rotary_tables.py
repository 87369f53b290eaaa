"""Cosines and sines of rotary embedding for every position of the served context length."""

import math

import torch
from torch import Tensor

from trunkline_worker.model.architectures.decoder_spec import DecoderSpec
from trunkline_worker.model.architectures.rope_scaling import RopeSpec
from trunkline_worker.model.checkpoint.refusals import ModelError


def layer_tables(spec: DecoderSpec, context_length: int, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """Returns cos and sin of each layer, as rotary_tables() does; [context_length, 0] for layers without an embedding.
    Layers with one embedding share them."""
    nothing = torch.empty(context_length, 0, device=device)
    on_device: dict[RopeSpec | None, tuple[Tensor, Tensor]] = {None: (nothing, nothing)}
    for rope in spec.ropes:
        cos, sin = rotary_tables(rope, context_length)
        on_device[rope] = cos.to(device), sin.to(device)
    return [on_device[layer.attention.rope] for layer in spec.layers]


def rotary_tables(rope: RopeSpec, context_length: int) -> tuple[Tensor, Tensor]:
    """Returns cos and sin of the angles, times the attention factor: each [context_length, width / 2] float32.

    KV blocks are shared between sequences, and a generation must be replayable. Frequencies therefore never depend on
    the current length of a sequence. Where they do in transformers, they depend on the served context length here:

    - longrope uses the long factors for all sequences if the context length exceeds the original one, else the short
      ones, as vLLM does.
    - dynamic (NTK-aware) is plain rotary embedding up to the trained context, as in transformers. Past it, all
      sequences use the base that transformers gives to a sequence of the context length.
    """
    frequencies = _frequencies(rope, context_length)
    angles = torch.outer(torch.arange(context_length).float(), frequencies)
    cos, sin = angles.cos(), angles.sin_()  # in place: a long context's tables take gigabytes
    return cos.mul_(rope.attention_factor), sin.mul_(rope.attention_factor)


def table_bytes(spec: DecoderSpec, context_length: int) -> int:
    """Returns the bytes that the tables of layer_tables() take; its peak is the same."""
    return sum(2 * context_length * (rope.width // 2) * torch.float32.itemsize for rope in spec.ropes)


def check_rotary(spec: DecoderSpec, context_length: int) -> None:
    """Raises ModelError if settings of a layer, although each is in its range, give an angle that is not finite."""
    for rope in spec.ropes:
        try:
            frequencies = _frequencies(rope, context_length)
            is_finite = bool((frequencies * context_length).isfinite().all())
        except (ArithmeticError, ValueError):
            is_finite = False
        if not is_finite:
            raise ModelError(f"the settings of RoPE scaling {rope.kind} give angles that are not finite numbers")


def _frequencies(rope: RopeSpec, context_length: int) -> Tensor:
    """Returns radians per position: [width / 2]."""
    exponents = torch.arange(0, rope.width, 2, dtype=torch.int64).float() / rope.width
    theta = rope.theta
    if rope.kind == "dynamic" and context_length > rope.trained_context:
        stretched = rope.factor * context_length / rope.trained_context - (rope.factor - 1)
        theta *= stretched ** (rope.width / (rope.width - 2))
    waves = theta**exponents
    if rope.kind == "longrope":
        factors = rope.long_factors if rope.uses_long_factors(context_length) else rope.short_factors
        return 1.0 / (torch.tensor(factors, dtype=torch.float32) * waves)
    if rope.kind == "yarn":
        return _yarn_frequencies(waves, rope)
    frequencies = 1.0 / waves
    if rope.kind == "linear":
        return frequencies / rope.factor
    return _llama3_frequencies(frequencies, rope) if rope.kind == "llama3" else frequencies


def _yarn_frequencies(waves: Tensor, rope: RopeSpec) -> Tensor:
    """YaRN (Peng et al., 2023): waves with more than beta_fast rotations within the original context are kept, waves
    with fewer than beta_slow are stretched by `factor`, and waves between the two are blended by dimension."""

    def dimension_of(rotations: float) -> float:
        at = math.log(rope.original_context / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))
        return rope.width * at

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.width - 1)
    if low == high:
        high += 0.001  # avoids division by zero
    stretched = ((torch.arange(rope.width // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - stretched
    return 1.0 / (rope.factor * waves) * (1 - kept) + 1.0 / waves * kept


def _llama3_frequencies(frequencies: Tensor, rope: RopeSpec) -> Tensor:
    """Llama 3.1's scaling: long waves are stretched by `factor`, short ones are kept, waves between are blended."""
    wavelengths = 2 * math.pi / frequencies
    longest_kept = rope.original_context / rope.high_freq_factor
    shortest_stretched = rope.original_context / rope.low_freq_factor
    blend = (rope.original_context / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - blend) * frequencies / rope.factor + blend * frequencies
    scaled = torch.where(wavelengths > shortest_stretched, frequencies / rope.factor, blended)
    return torch.where(wavelengths < longest_kept, frequencies, scaled)
