"""Loads a directory with an encoder into one that is ready to run."""

import ctypes
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from trunkline_kernels.cpu.library import library
from trunkline_worker.model.checkpoint.checkpoint import Checkpoint, fingerprint
from trunkline_worker.model.checkpoint.entries import Entries
from trunkline_worker.model.checkpoint.refusals import ModelError
from trunkline_worker.model.checkpoint.weight_digest import WeightDigests
from trunkline_worker.model.checkpoint.weight_stream import WeightStream
from trunkline_worker.model.config_json import DTYPES, read_dtype
from trunkline_worker.model.encoders.encoder import Encoder
from trunkline_worker.model.encoders.encoder_attention import (
    AttentionOf,
    c_attention,
    torch_attention,
    triton_attention,
)
from trunkline_worker.model.encoders.encoder_config import PooledEncoder
from trunkline_worker.model.encoders.encoder_spec import EncoderSpec
from trunkline_worker.model.encoders.encoder_weights import UNUSED, pack_products, prefix_of, read_encoder
from trunkline_worker.model.pooling.head_reading import files_of_head, read_head
from trunkline_worker.model.pooling.pooling_head import PoolingHead
from trunkline_worker.model.pooling.pooling_spec import PoolingSpec

# Part of the fingerprint. Raise it when a change of the code changes the bits of results.
ENCODER_BUILD = "6"
MOST_TRITON_HEAD_DIM = 128  # of text_attention.py, which only systems with Triton can import


@dataclass(frozen=True, slots=True)
class LoadedEncoder:
    """An encoder with its head, and the settings of its directory that the worker needs to serve it."""

    encoder: Encoder
    spec: EncoderSpec
    head: PoolingHead
    pooling: PoolingSpec
    fingerprint: str  # of config, weights and code
    dtype: torch.dtype
    device: torch.device
    context_length: int
    notes: tuple[str, ...] = ()


@torch.inference_mode()
def load_encoder(
    directory: Path,
    model: PooledEncoder,
    *,
    dtype: str = "auto",
    device: torch.device,
    kernels: str = "auto",
    deterministic: bool = False,
    context_length: int | None = None,
) -> LoadedEncoder:
    """Loads weights. Raises ModelError (one line) if the model cannot be served.

    kernels: of attention, and of products on a CPU: "triton", "torch" (the reference), or "auto": Triton on a GPU, on a
        CPU C and oneDNN
    """
    spec, pooling = model.spec, model.pooling
    if context_length is not None and context_length > spec.context_length:
        raise ModelError(f"--context-length {context_length} is more than the model's {spec.context_length}")
    context = context_length or min(spec.context_length, pooling.most_tokens or spec.context_length)
    if kernels == "auto":
        on_gpu = "triton" if spec.sizes.head_dim <= MOST_TRITON_HEAD_DIM else "torch"
        kernels = on_gpu if device.type == "cuda" else "c"
    if kernels == "triton" and spec.sizes.head_dim > MOST_TRITON_HEAD_DIM:
        raise ModelError(f"head_dim {spec.sizes.head_dim} is not supported by the Triton kernel: use --kernels torch")
    stream = None if device.type == "cpu" else WeightStream(device)
    with ExitStack() as stack:
        checkpoint = stack.enter_context(Checkpoint(directory, stream))
        files = [*checkpoint.files, *files_of_head(pooling, directory)]
        digests = stack.enter_context(WeightDigests(files))
        words = f"{prefix_of(spec, checkpoint)}{spec.embedding.words}.weight"
        named = dtype if dtype != "auto" else read_dtype(Entries(model.config))
        kind = checkpoint.stored_dtype(words) if named is None else getattr(torch, named)
        if str(kind).removeprefix("torch.") not in DTYPES:
            kind = torch.float32
        checkpoint.skip_all(UNUSED)
        weights = read_encoder(spec, kind, device, checkpoint)
        checkpoint.check_finite(kind)
        head = read_head(pooling, directory, checkpoint, weights.words, is_tied=True)
        checkpoint.check_all_read(())
        weight_digests = digests.digests()
    c_kernels = _c_kernels(kind) if kernels == "c" else None
    if c_kernels is not None and not deterministic:
        pack_products(weights, c_kernels)
    attention_of: AttentionOf = torch_attention(is_invariant=deterministic)
    if kernels == "triton":
        attention_of = triton_attention(kind, device)
    elif c_kernels is not None:
        attention_of = c_attention(c_kernels, spec.sizes.head_dim)
    facts = (
        str(kind),
        ENCODER_BUILD,
        device.type,
        "torch" if kernels == "c" and c_kernels is None else kernels,
        "deterministic" if deterministic else "",
        repr(spec),
        repr(pooling),
    )
    return LoadedEncoder(
        encoder=Encoder(spec, weights, attention_of, deterministic=deterministic),
        spec=spec,
        head=head,
        pooling=pooling,
        fingerprint=fingerprint(directory, weight_digests, *facts),
        dtype=kind,
        device=device,
        context_length=context,
    )


def _c_kernels(dtype: torch.dtype) -> ctypes.CDLL | None:
    """The kernels; None if there are none for this dtype, or on this machine. Raises ModelError if TRUNKLINE_MARCH
    names a build that this CPU cannot run."""
    try:
        return library(dtype)
    except ValueError as error:
        raise ModelError(str(error)) from None
