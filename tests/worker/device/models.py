"""Models without weights, and what a device could have computed with them."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from trunkline.v1.generation_pb2 import SamplingParams
from trunkline_kernels.quantized_weight import quantize_blocks
from trunkline_worker.model import gpu_decoder
from trunkline_worker.model.architectures.decoder_spec import DecoderSpec
from trunkline_worker.model.checkpoint.checkpoint import EMBEDDING, HEAD
from trunkline_worker.model.config_json import read_spec
from trunkline_worker.model.gpu_decoder import GpuDecoder
from trunkline_worker.model.loading import KV_DTYPES, LoadedModel
from trunkline_worker.model.pooling.pooling_head import PoolingHead, Projection
from trunkline_worker.model.pooling.pooling_spec import Pooling
from trunkline_worker.model.weight_reading import build_weights
from trunkline_worker.model.weights import Linear, QuantizedLinear, StoredLinear, stored, weight_bytes

CONFIGS = Path(__file__).parents[3] / "bench" / "configs"
NAMES = ("qwen3-8b", "llama-3.1-8b", "qwen3-0.6b")
IN_BLOCKS = "fp8 in blocks"
WRONG_SHARE = 0.02  # of samples whose logits are not finite


def spec_of(name: str, *, layers: int | None = None, window: int | None = None) -> DecoderSpec:
    """The spec of a config in bench/configs; with fewer layers, of which every other one has a window."""
    spec = read_spec(CONFIGS / name)
    count = layers or spec.num_layers
    full = spec.layers[0]
    windowed = replace(full, attention=replace(full.attention, window=window))
    return replace(spec, layers=tuple(windowed if at % 2 else full for at in range(count)))


def in_blocks(product: StoredLinear) -> StoredLinear:
    assert isinstance(product, Linear)
    return QuantizedLinear(quantize_blocks(product.weight), product.bias)


@torch.inference_mode()
def model_of(
    spec: DecoderSpec,
    *,
    deterministic: bool = False,
    quantization: str = "none",
    kv_dtype: str = "auto",
    context_length: int | None = None,
    num_labels: int = 0,
) -> LoadedModel:
    """A model on the device that is running, loaded as load_model() loads one.

    quantization: IN_BLOCKS: as of a checkpoint that is stored so
    num_labels: of a model that scores; 0: it generates
    """
    device, dtype = torch.device("cuda"), torch.bfloat16
    gpu_decoder.check_options(spec, device, deterministic=deterministic, quantization=quantization, kv_dtype=kv_dtype)
    weights = build_weights(
        spec, dtype, device, lambda target, name: None,
        in_blocks if quantization == IN_BLOCKS else partial(stored, quantization=quantization),
        names=(EMBEDDING, None if spec.tie_word_embeddings else HEAD),
    )  # fmt: skip
    context, kv = context_length or spec.context_length, KV_DTYPES.get(kv_dtype, dtype)
    decoder = GpuDecoder(spec, weights, context_length=context, deterministic=deterministic, kv_dtype=kv)
    return LoadedModel(
        decoder, spec, "fingerprint", dtype, kv, device, context, frozenset({1}), SamplingParams(), deterministic,
        weight_bytes(weights), head=head_of(spec.hidden_size, num_labels) if num_labels else None,
    )  # fmt: skip


def head_of(hidden: int, num_labels: int, pooling: Pooling = Pooling.LAST) -> PoolingHead:
    """A head on the device that is running."""
    weight = torch.empty(num_labels, hidden, dtype=torch.float32, device=torch.device("cuda"))
    return PoolingHead(pooling, (Projection(weight, None, "identity", None, 0.0),))


def inventions(vocab_size: int, seed: int) -> Callable[[Tensor], None]:
    """Fills a tensor of the host with token ids, ranks or log-probabilities, whichever its type is for."""
    draw = np.random.default_rng(seed)

    def invent(target: Tensor) -> None:
        shape = tuple(target.shape)
        if target.dtype == torch.int64:
            tokens = draw.integers(0, vocab_size, shape)
            values = np.where(draw.random(shape) < WRONG_SHARE, -1, tokens)
        elif target.dtype == torch.int32:
            values = draw.integers(0, vocab_size, shape, dtype=np.int32)
        else:
            values = -draw.random(shape, dtype=np.float32)
        target.numpy()[...] = values

    return invent
