"""From a Hugging Face directory to a decoder that is ready to run."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trunkline.status import RequestRefused
from trunkline.v1.generation_pb2 import SamplingParams
from trunkline.validation import validate_sampling, validate_token_ids
from trunkline_worker.model.checkpoint import Checkpoint, fingerprint
from trunkline_worker.model.cpu_decoder import CpuDecoder, cpu_decoder
from trunkline_worker.model.decoder import Decoder, DecoderWeights, LayerWeights
from trunkline_worker.model.errors import ModelError
from trunkline_worker.model.spec import DecoderSpec, read_json, read_spec
from trunkline_worker.model.weight_stream import WeightStream

if TYPE_CHECKING:
    from trunkline_worker.model.gpu_decoder import GpuDecoder

# Part of the fingerprint: raised when a change of kernels or model code changes bits.
KERNEL_BUILD = "3"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
KV_DTYPES = {"fp8": torch.float8_e4m3fn}
DUMMY_SEED = 0
DUMMY_STD = 0.02
# Written by old exporters; recomputed here.
IGNORED_TENSORS = ("rotary_emb.inv_freq",)

Fill = Callable[[Tensor, str], None]  # fills a tensor of the given Hugging Face name in place
FinishLayer = Callable[[LayerWeights], LayerWeights]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A decoder and what its directory says about using it."""

    decoder: "Decoder | CpuDecoder | GpuDecoder"
    spec: DecoderSpec
    fingerprint: str
    dtype: torch.dtype
    kv_dtype: torch.dtype
    device: torch.device
    context_length: int
    eos_token_ids: frozenset[int]
    default_sampling: SamplingParams
    deterministic: bool

    def kv_bytes_per_block(self, block_size: int) -> int:
        """Keys and values of all layers."""
        spec = self.spec
        return 2 * spec.num_layers * block_size * spec.num_kv_heads * spec.head_dim * self.kv_dtype.itemsize


@torch.inference_mode()
def load_model(
    directory: Path,
    *,
    dtype: str = "auto",
    device: torch.device,
    load_format: str = "auto",
    kernels: str = "auto",
    quantization: str = "none",
    kv_dtype: str = "auto",
    deterministic: bool = False,
    context_length: int | None = None,
) -> LoadedModel:
    """Loads config, weights and generation defaults. Raises ModelError, one line.

    kernels: "triton", "torch" (the twins), or "auto": Triton on a GPU, on a CPU C where it can do the model
    """
    spec = read_spec(directory)
    name = spec.dtype if dtype == "auto" else dtype
    if name not in DTYPES:
        raise ModelError(f"dtype {name} is not supported; supported: {', '.join(DTYPES)}")
    if context_length is not None and context_length > spec.context_length:
        raise ModelError(f"--context-length {context_length} is more than the model's {spec.context_length}")
    context = context_length or spec.context_length
    if kernels == "auto":
        kernels = "triton" if device.type == "cuda" else "torch" if deterministic else "c"
    for option, value, plain in (("quantization", quantization, "none"), ("kv_dtype", kv_dtype, "auto")):
        if value != plain and kernels != "triton":
            raise ModelError(f"{option}={value} needs the Triton kernels: use a GPU, or leave it out")
    facts = (
        name, KERNEL_BUILD, device.type, kernels, quantization, kv_dtype,
        "deterministic" if deterministic else "", load_format,
    )  # fmt: skip
    finish: FinishLayer = _as_it_is
    if kernels == "triton":
        # Only here: Triton is not there on every system, and takes a third of a second to import.
        from trunkline_worker.model import gpu_decoder

        gpu_decoder.check_options(
            spec, device, deterministic=deterministic, quantization=quantization, kv_dtype=kv_dtype
        )
        # Layer by layer, so that a model need not fit before it is quantised.
        finish = partial(gpu_decoder.quantized_layer, quantization=quantization)
    if load_format == "dummy":
        weights = build_weights(spec, DTYPES[name], device, _dummy_fill(device), finish)
        identity = fingerprint(directory, [], *facts, str(DUMMY_SEED))
    else:
        stream = None if device.type == "cpu" else WeightStream(device)
        with Checkpoint(directory, stream) as checkpoint:
            weights = build_weights(spec, DTYPES[name], device, checkpoint.read_into, finish)
            tied = ("lm_head.weight",) if spec.tie_word_embeddings else ()
            checkpoint.check_all_read(IGNORED_TENSORS + tied)
            identity = fingerprint(directory, checkpoint.files, *facts)
    eos, defaults = read_generation_defaults(directory, spec.vocab_size)
    decoder: Decoder | CpuDecoder | GpuDecoder | None
    if kernels == "triton":
        decoder = gpu_decoder.GpuDecoder(
            spec, weights, context_length=context, deterministic=deterministic,
            kv_dtype=KV_DTYPES.get(kv_dtype, DTYPES[name]),
        )  # fmt: skip
    else:
        decoder = cpu_decoder(spec, weights, context_length=context) if kernels == "c" else None
    return LoadedModel(
        decoder=decoder or Decoder(spec, weights, context_length=context, deterministic=deterministic),
        spec=spec,
        fingerprint=identity,
        dtype=DTYPES[name],
        kv_dtype=KV_DTYPES.get(kv_dtype, DTYPES[name]),
        device=device,
        context_length=context,
        eos_token_ids=eos,
        default_sampling=defaults,
        deterministic=deterministic,
    )


def build_weights(
    spec: DecoderSpec, dtype: torch.dtype, device: torch.device, fill: Fill, finish: FinishLayer
) -> DecoderWeights:
    """Allocates every tensor once, on its device, and has it filled; fused ones part by part.

    finish: what becomes of a layer once it is filled
    """

    def tensor(name: str, *shape: int) -> Tensor:
        target = torch.empty(shape, dtype=dtype, device=device)
        fill(target, name)
        return target

    def fused(names: list[str], sizes: list[int], *rest: int) -> Tensor:
        target = torch.empty(sum(sizes), *rest, dtype=dtype, device=device)
        for part, name in zip(torch.split(target, sizes), names, strict=True):
            fill(part, name)
        return target

    hidden, inter = spec.hidden_size, spec.intermediate_size
    heads, kv_heads = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim

    def layer(index: int) -> LayerWeights:
        at = f"model.layers.{index}."
        attention, mlp = at + "self_attn.", at + "mlp."
        qkv = [attention + f"{part}_proj." for part in "qkv"]
        gate_up = [mlp + "gate_proj.", mlp + "up_proj."]
        sizes = [heads, kv_heads, kv_heads]
        return LayerWeights(
            input_norm=tensor(at + "input_layernorm.weight", hidden),
            qkv=fused([name + "weight" for name in qkv], sizes, hidden),
            qkv_bias=fused([name + "bias" for name in qkv], sizes) if spec.qkv_bias else None,
            query_norm=tensor(attention + "q_norm.weight", spec.head_dim) if spec.qk_norm else None,
            key_norm=tensor(attention + "k_norm.weight", spec.head_dim) if spec.qk_norm else None,
            output=tensor(attention + "o_proj.weight", hidden, heads),
            output_bias=tensor(attention + "o_proj.bias", hidden) if spec.output_bias else None,
            post_norm=tensor(at + "post_attention_layernorm.weight", hidden),
            gate_up=fused([name + "weight" for name in gate_up], [inter, inter], hidden),
            gate_up_bias=fused([name + "bias" for name in gate_up], [inter, inter]) if spec.mlp_bias else None,
            down=tensor(mlp + "down_proj.weight", hidden, inter),
            down_bias=tensor(mlp + "down_proj.bias", hidden) if spec.mlp_bias else None,
        )

    embedding = tensor("model.embed_tokens.weight", spec.vocab_size, hidden)
    return DecoderWeights(
        embedding=embedding,
        layers=[finish(layer(index)) for index in range(spec.num_layers)],
        final_norm=tensor("model.norm.weight", hidden),
        head=embedding if spec.tie_word_embeddings else tensor("lm_head.weight", spec.vocab_size, hidden),
    )


def _as_it_is(layer: LayerWeights) -> LayerWeights:
    return layer


def _dummy_fill(device: torch.device) -> Fill:
    """Seeded random weights: matrices small, norms one, biases zero."""
    generator = torch.Generator(device).manual_seed(DUMMY_SEED)

    def fill(target: Tensor, name: str) -> None:
        if name.endswith("bias"):
            target.zero_()
        elif name.endswith("norm.weight"):
            target.fill_(1.0)
        else:
            target.normal_(std=DUMMY_STD, generator=generator)

    return fill


def read_generation_defaults(directory: Path, vocab_size: int) -> tuple[frozenset[int], SamplingParams]:
    """End-of-sequence ids and sampling defaults: generation_config.json, else config.json for the ids.

    A generation config that does not say do_sample means greedy to Hugging Face; but one that sets nothing at all is
    no decision, so then the neutral defaults stand.
    """
    config = read_json(directory / "config.json")
    path = directory / "generation_config.json"
    generation = read_json(path) if path.is_file() else {}
    eos = generation.get("eos_token_id")
    eos = config.get("eos_token_id") if eos is None else eos
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    defaults = SamplingParams()
    try:
        if generation.get("do_sample"):
            for name in ("temperature", "top_k", "top_p", "min_p"):
                if generation.get(name) is not None:
                    setattr(defaults, name, generation[name])
        if generation.get("repetition_penalty") is not None:
            defaults.repetition_penalty = generation["repetition_penalty"]
        validate_token_ids(ids, vocab_size=vocab_size, field="eos_token_id")
        validate_sampling(defaults, vocab_size=vocab_size, prefix="default")
        return frozenset(int(token) for token in ids), defaults
    except (TypeError, ValueError, RequestRefused) as error:
        raise ModelError(f"{path}: {error}") from None
