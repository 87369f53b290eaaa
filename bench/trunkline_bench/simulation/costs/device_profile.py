"""Devices, model shapes, and the time of a step by a roofline model.

Device figures are from the vendor's data sheets: peak rates as in trunkline_worker.step.model_work, and memory.
Shapes are from config.json of Llama-3.1-8B, Qwen3-32B, Llama-3.1-70B and Qwen3-30B-A3B on the Hugging Face hub.

Assumed shares of these figures: matrix products reach 0.70 of the peak and attention over prompts 0.55
(FlashAttention-3, Shah et al., 2024, reports 0.5 to 0.75 on H100; large bfloat16 products on H100 are commonly measured
at 0.6 to 0.75); memory accesses reach 0.85 of the bandwidth (decode kernels of FlashInfer, Ye et al., MLSys 2025,
report 0.8 to 0.9). These are estimates, not measurements; calibration.py fits a cost to measured steps.
"""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trunkline_bench.simulation.costs.step_work import StepWork
from trunkline_worker.engine.step_floor import model_work
from trunkline_worker.model.architectures.config_json import parse_spec, read_spec
from trunkline_worker.model.architectures.decoder_spec import DecoderSpec
from trunkline_worker.step.model_work import DATA_SHEETS, ModelWork

CONFIGS = Path(__file__).parents[3] / "configs"
GB = 1e9
BYTES_PER_WEIGHT = 2  # bfloat16
MATMUL_SHARE = 0.70
ATTENTION_SHARE = 0.55
BANDWIDTH_SHARE = 0.85
# Per step: kernel launches (mostly hidden by CUDA graphs), sampling, bookkeeping on the device.
STEP_OVERHEAD_S = 400e-6
ALL_REDUCE_LATENCY_S = 10e-6
ACTIVATION_BYTES = 2 * GB  # kept free of weights and KV


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator."""

    name: str
    flops: float  # dense, bfloat16
    bandwidth_bytes_s: float
    memory_bytes: float
    link_bytes_s: float  # to its peers, one direction


@dataclass(frozen=True, slots=True)
class Model:
    """A model in bfloat16."""

    name: str
    spec: DecoderSpec

    @property
    def work(self) -> ModelWork:
        """What the work of its steps depends on."""
        return model_work(
            self.spec,
            layer_bytes=BYTES_PER_WEIGHT * (self.spec.layer_params - self.spec.expert_params),
            expert_bytes=BYTES_PER_WEIGHT * self.spec.expert_params,
            head_bytes=BYTES_PER_WEIGHT * self.spec.head_params,
            kv_itemsize=BYTES_PER_WEIGHT,
        )

    @property
    def weight_bytes(self) -> int:
        work = self.work
        return work.layer_bytes + work.expert_bytes + work.head_bytes * (1 if self.spec.tie_word_embeddings else 2)


def _model(name: str, architecture: str, *sizes: int) -> Model:
    """A model by its architecture and the values of SIZES."""
    config = dict(zip(SIZES, sizes, strict=True)) | {"max_position_embeddings": 131_072, "rms_norm_eps": 1e-6}
    return Model(name, parse_spec(config | {"model_type": architecture}))


def _device(name: str, sheet: str, memory_bytes: float, link_bytes_s: float) -> Device:
    """A device with the rates of a data sheet, by the name that torch reports."""
    return Device(name, DATA_SHEETS[sheet].flops, DATA_SHEETS[sheet].bytes_per_s, memory_bytes, link_bytes_s)


DEVICES = {
    "h200": _device("h200", "NVIDIA H200", 141 * GB, 450e9),
    "h100": _device("h100", "NVIDIA H100 80GB HBM3", 80 * GB, 450e9),
    "a100": _device("a100", "NVIDIA A100-SXM4-80GB", 80 * GB, 300e9),
    "l4": _device("l4", "NVIDIA L4", 24 * GB, 32e9),  # no NVLink: PCIe 4.0 x16
}
SIZES = (
    "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size",
    "vocab_size",
)  # fmt: skip
MODELS = {
    "8b": _model("Llama-3.1-8B", "llama", 32, 4096, 32, 8, 128, 14336, 128256),
    "32b": _model("Qwen3-32B", "qwen3", 64, 5120, 64, 8, 128, 25600, 151936),
    "70b": _model("Llama-3.1-70B", "llama", 80, 8192, 64, 8, 128, 28672, 128256),
    "30b-a3b": Model("Qwen3-30B-A3B", read_spec(CONFIGS / "qwen3-30b-a3b")),
}


@dataclass(frozen=True, slots=True)
class Profile:
    """A model on one device, or sharded over several by tensor parallelism."""

    name: str
    device: Device
    model: Model
    num_devices: int
    # Derived once, since every step needs them.
    _work: ModelWork = field(init=False, repr=False, compare=False)
    _hidden: int = field(init=False, repr=False, compare=False)
    _all_reduces: int = field(init=False, repr=False, compare=False)
    _kv_bytes_per_token: int = field(init=False, repr=False, compare=False)
    _bandwidth: float = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # A KV head is not split, so if there are more devices than KV heads, some devices keep copies.
        copies = max(1, self.num_devices // self.model.spec.num_kv_heads)
        spec = self.model.spec
        summed = [product.shard == "in" for layer in spec.layers for product in layer.products]
        object.__setattr__(self, "_hidden", spec.hidden_size)
        object.__setattr__(self, "_all_reduces", sum(summed))
        object.__setattr__(self, "_work", self.model.work)
        object.__setattr__(self, "_kv_bytes_per_token", copies * self._work.kv_token_bytes)
        object.__setattr__(self, "_bandwidth", self.num_devices * self.device.bandwidth_bytes_s * BANDWIDTH_SHARE)

    def kv_blocks(self, block_size: int, memory_share: float = 0.9) -> int:
        """KV blocks that fit in memory beside the weights."""
        room = self.num_devices * (self.device.memory_bytes * memory_share - ACTIVATION_BYTES) - self.model.weight_bytes
        return int(room / (self._kv_bytes_per_token * block_size))

    def step_time_s(self, work: StepWork) -> float:
        """Sum over the parts of a step, each the larger of bytes / bandwidth and operations / peak."""
        decode_s = work.decode_kv_tokens * self._kv_bytes_per_token / self._bandwidth
        return self._base_s(work) + decode_s

    def run_times_s(self, work: StepWork, count: int) -> NDArray[np.float64]:
        """Times of `count` decode-only steps: `work` is the first, and every context grows by one token per step.

        They equal step_time_s bit by bit."""
        kv_tokens = work.decode_kv_tokens + work.num_sequences * np.arange(count)
        times: NDArray[np.float64] = self._base_s(work) + kv_tokens * self._kv_bytes_per_token / self._bandwidth
        return times

    def _base_s(self, work: StepWork) -> float:
        """The time without reading the KV of decodes."""
        least, flops = self._work, self.num_devices * self.device.flops
        layers_s = max(
            least.read_bytes(work.num_rows) / self._bandwidth,
            least.layer_flops(work.num_rows) / (flops * MATMUL_SHARE),
        )
        head_s = max(
            least.head_bytes / self._bandwidth if work.num_sampled else 0.0,
            least.head_flops(work.num_sampled) / (flops * MATMUL_SHARE),
        )
        chunks_s = max(
            least.attention_flops(work.chunk_pairs) / (flops * ATTENTION_SHARE),
            work.chunk_kv_tokens * self._kv_bytes_per_token / self._bandwidth,
        )
        return STEP_OVERHEAD_S + layers_s + head_s + chunks_s + self._all_reduce_s(work)

    def _all_reduce_s(self, work: StepWork) -> float:
        """Time of the all-reduces, over a ring: each product that is divided along its inner dimension has one."""
        if self.num_devices == 1:
            return 0.0
        sent = 2 * (self.num_devices - 1) / self.num_devices * work.num_rows * self._hidden * BYTES_PER_WEIGHT
        return self._all_reduces * (ALL_REDUCE_LATENCY_S + sent / self.device.link_bytes_s)


def _fewest_devices(device: Device, model: Model) -> int:
    """The smallest power of two of devices that hold the weights, and a quarter as much again for KV."""
    count = 1
    while count * (device.memory_bytes * 0.9 - ACTIVATION_BYTES) < 1.25 * model.weight_bytes:
        count *= 2
    return count


PROFILES = {
    f"{device.name}-{size}": Profile(f"{device.name}-{size}", device, model, _fewest_devices(device, model))
    for device in DEVICES.values()
    for size, model in MODELS.items()
}
