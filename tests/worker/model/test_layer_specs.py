"""What no model here says yet by layer specs and weights: norms in other places, and slices of weights."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Barrier
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import linear

from tests.worker.engine_rig import drive, make_engine, make_submit
from tests.worker.model.forward import ragged_logits
from tests.worker.model.oracle import base_config, their_logits, their_model, weights_of, write_config
from trunkline_worker.model.architectures.architecture import LayerSizes
from trunkline_worker.model.architectures.decoder_spec import LayerSpec, LinearSpec
from trunkline_worker.model.architectures.llama import LLAMA
from trunkline_worker.model.architectures.registry import ARCHITECTURES
from trunkline_worker.model.checkpoint.entries import Entries
from trunkline_worker.model.cpu_decoder import CpuDecoder
from trunkline_worker.model.decoder import Decoder
from trunkline_worker.model.loading import load_model
from trunkline_worker.model.weights import Linear, StoredLinear

CPU = torch.device("cpu")
OTHER = "OtherForCausalLM"
SEQUENCES = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3], [8, 4], [6] * 7]


class Places(NamedTuple):
    """The names of the norms of a layer, where it has one."""

    before_attention: str | None = None
    after_attention: str | None = None
    before_feed_forward: str | None = None
    after_feed_forward: str | None = None


PLACES = {
    "after, as in OLMo 2": Places(
        after_attention="post_attention_layernorm", after_feed_forward="post_feedforward_layernorm"
    ),
    "before and after, as in Gemma 2": Places(
        "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
    ),
    "before attention and after the feed-forward part": Places("first_norm", after_feed_forward="last_norm"),
}


def forward(layer: Any, places: Places, hidden: Tensor, **options: Any) -> Tensor:
    """A layer of transformers with its norms in other places."""

    def normed(name: str | None, x: Tensor) -> Tensor:
        return x if name is None else getattr(layer, name)(x)

    attended, _ = layer.self_attn(hidden_states=normed(places.before_attention, hidden), **options)
    hidden = hidden + normed(places.after_attention, attended)
    result = layer.mlp(normed(places.before_feed_forward, hidden))
    return hidden + normed(places.after_feed_forward, result)


@torch.no_grad()
def model_with(places: Places, directory: Path) -> Any:
    """A Llama of transformers with its norms in other places, which is now in the directory."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    config = base_config(LLAMA.name)
    theirs = their_model(directory, config)
    draw = torch.Generator().manual_seed(5)
    for layer in theirs.model.layers:
        del layer.input_layernorm, layer.post_attention_layernorm
        for name in filter(None, places):
            norm = LlamaRMSNorm(config["hidden_size"], eps=config["rms_norm_eps"])
            norm.weight.add_(torch.randn(norm.weight.shape, generator=draw) * 0.2)
            setattr(layer, name, norm)
        layer.forward = partial(forward, layer, places)
    save_file(
        {name: tensor.contiguous() for name, tensor in theirs.state_dict().items()}, directory / "model.safetensors"
    )
    write_config(directory, config | {"architectures": [OTHER], "model_type": "other"})
    return theirs


def learn(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    """Registers the architecture: this is all that a module of it has to say."""

    def layers(config: Entries, sizes: LayerSizes) -> Iterator[LayerSpec]:
        for layer in LLAMA.layers(config, sizes):
            yield LayerSpec(
                replace(layer.attention, norm=places.before_attention, post_norm=places.after_attention),
                replace(layer.feed_forward, norm=places.before_feed_forward, post_norm=places.after_feed_forward),
            )

    monkeypatch.setitem(ARCHITECTURES, OTHER, replace(LLAMA, name=OTHER, model_type="other", layers=layers))


@pytest.mark.parametrize("name", PLACES)
def test_norms_in_other_places_give_the_logits_of_transformers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = model_with(PLACES[name], tmp_path)
    learn(PLACES[name], monkeypatch)
    for kernels, deterministic in (("auto", False), ("torch", False), ("torch", True)):
        model = load_model(tmp_path, device=CPU, kernels=kernels, deterministic=deterministic)
        assert isinstance(model.decoder, CpuDecoder) == (kernels == "auto")
        for tokens, logits in zip(SEQUENCES, ragged_logits(model, SEQUENCES), strict=True):
            torch.testing.assert_close(logits, their_logits(theirs, tokens), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("name", PLACES)
def test_norms_in_other_places_give_the_same_with_triton(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_with(PLACES[name], tmp_path)
    learn(PLACES[name], monkeypatch)

    def found(kernels: str) -> tuple[list[float], dict[int, list[int]]]:
        # The second prompt's last layer computes only the token to sample from.
        submits = [
            make_submit(1, SEQUENCES[0], max_tokens=2, ignore_eos=True, prompt_logprobs=0),
            make_submit(2, SEQUENCES[2], max_tokens=2, ignore_eos=True),
        ]
        done = [drive(make_engine(tmp_path, kernels=kernels, kv_blocks=16), [submit]) for submit in submits]
        logprobs = [entry.chosen.logprob for entry in done[0].outputs[1][0].prompt.logprobs[1:]]
        return logprobs, done[0].tokens | done[1].tokens

    (expected, tokens), (logprobs, same) = found("torch"), found("triton")
    assert logprobs == pytest.approx(expected, abs=1e-4)
    assert same == tokens


class Exchange:
    """Adds up what two devices have, each of which is a thread."""

    def __init__(self) -> None:
        self._barrier = Barrier(2, timeout=60)
        self._parts = {0: torch.empty(0), 1: torch.empty(0)}

    def sum(self, rank: int, part: Tensor) -> Tensor:
        self._parts[rank] = part
        self._barrier.wait()
        total = self._parts[0] + self._parts[1]
        self._barrier.wait()
        return total


@dataclass(frozen=True, slots=True)
class Summand(Linear):
    """A slice along the inner axis: its product is one of two summands."""

    exchange: Exchange
    rank: int

    def multiply(self, x: Tensor) -> Tensor:
        return self.exchange.sum(self.rank, linear(x, self.weight, self.bias))


def slice_of(product: StoredLinear, spec: LinearSpec, exchange: Exchange, rank: int) -> StoredLinear:
    """The half of a weight that a device has."""
    assert isinstance(product, Linear)
    if spec.shard == "in":
        return Summand(product.weight.chunk(2, 1)[rank], product.bias if rank == 0 else None, exchange, rank)

    def halves(whole: Tensor) -> Tensor:
        return torch.cat([part.chunk(2)[rank] for part in torch.split(whole, spec.rows)])

    return Linear(halves(product.weight), None if product.bias is None else halves(product.bias))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_two_devices_with_slices_along_the_axes_of_the_specs_compute_the_whole(
    architecture: str, tmp_path: Path
) -> None:
    their_model(tmp_path, base_config(architecture))
    model = load_model(tmp_path, device=CPU, kernels="torch")
    weights, spec, exchange = weights_of(model), model.spec, Exchange()

    def device(rank: int) -> list[Tensor]:
        class Device(Decoder):
            """Norms of all heads see the heads of both devices."""

            def _norm_heads(self, x: Tensor, weight: Tensor | None) -> Tensor:
                if weight is None or len(weight) == spec.head_dim:
                    return super()._norm_heads(x, weight)
                squares = exchange.sum(rank, x.square().sum((1, 2)))
                scale = torch.rsqrt(squares / len(weight) + spec.rms_norm_eps)
                return x * scale[:, None, None] * weight.chunk(2)[rank].view(x.shape[1:])

        layers = [
            layer.with_products(
                slice_of(product, linear_spec, exchange, rank)
                for product, linear_spec in zip(layer.products, layer_spec.products, strict=True)
            )
            for layer, layer_spec in zip(weights.layers, spec.layers, strict=True)
        ]
        half = replace(spec, num_heads=spec.num_heads // 2, num_kv_heads=spec.num_kv_heads // 2)
        decoder = Device(half, replace(weights, layers=layers), context_length=64, deterministic=False)
        return ragged_logits(replace(model, spec=half, decoder=decoder), SEQUENCES)

    with ThreadPoolExecutor(2) as pool:
        for found in pool.map(device, range(2)):
            for logits, expected in zip(found, ragged_logits(model, SEQUENCES), strict=True):
                torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
