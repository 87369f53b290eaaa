"""Devices, model shapes, and the time of a step by a roofline model.

Device figures are from the vendor's data sheets: dense tensor-core throughput in bfloat16 (half of a figure that is
given with sparsity) and memory bandwidth.
    H200 SXM  141 GB  4.8 TB/s   989 TFLOP/s  NVIDIA H200 Tensor Core GPU datasheet, 2024
    H100 SXM   80 GB  3.35 TB/s  989 TFLOP/s  NVIDIA H100 Tensor Core GPU datasheet, 2023
    A100 SXM   80 GB  2.04 TB/s  312 TFLOP/s  NVIDIA A100 Tensor Core GPU datasheet, 2022
    L4         24 GB  0.30 TB/s  121 TFLOP/s  NVIDIA L4 Tensor Core GPU datasheet, 2023
Shapes are from config.json of Llama-3.1-8B, Qwen3-32B and Llama-3.1-70B on the Hugging Face hub.

Assumed shares of these figures: matrix products reach 0.70 of the peak and attention over prompts 0.55
(FlashAttention-3, Shah et al., 2024, reports 0.5 to 0.75 on H100; large bfloat16 products on H100 are commonly measured
at 0.6 to 0.75); memory accesses reach 0.85 of the bandwidth (decode kernels of FlashInfer, Ye et al., MLSys 2025,
report 0.8 to 0.9). These are estimates, not measurements; calibration.py fits a cost to measured steps.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from trunkline_bench.simulation.costs.step_work import StepWork

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
class ModelShape:
    """A dense decoder."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool = False

    @property
    def layer_params(self) -> int:
        """Parameters of all layers."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def head_params(self) -> int:
        return self.hidden * self.vocab

    @property
    def weight_bytes(self) -> int:
        embeddings = self.head_params * (1 if self.tied else 2)
        return BYTES_PER_WEIGHT * (self.layer_params + embeddings)

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * BYTES_PER_WEIGHT * self.layers * self.kv_heads * self.head_dim


DEVICES = {
    "h200": Device("h200", 989e12, 4.8e12, 141 * GB, 450e9),
    "h100": Device("h100", 989e12, 3.35e12, 80 * GB, 450e9),
    "a100": Device("a100", 312e12, 2.04e12, 80 * GB, 300e9),
    "l4": Device("l4", 121e12, 0.30e12, 24 * GB, 32e9),  # no NVLink: PCIe 4.0 x16
}
MODELS = {
    "8b": ModelShape("Llama-3.1-8B", 32, 4096, 32, 8, 128, 14336, 128256),
    "32b": ModelShape("Qwen3-32B", 64, 5120, 64, 8, 128, 25600, 151936),
    "70b": ModelShape("Llama-3.1-70B", 80, 8192, 64, 8, 128, 28672, 128256),
}


@dataclass(frozen=True, slots=True)
class Profile:
    """A model on one device, or sharded over several by tensor parallelism."""

    name: str
    device: Device
    model: ModelShape
    num_devices: int
    # Derived once, since every step needs them.
    _kv_bytes_per_token: int = field(init=False, repr=False, compare=False)
    _bandwidth: float = field(init=False, repr=False, compare=False)
    _layer_params: int = field(init=False, repr=False, compare=False)
    _head_params: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # A KV head is not split, so if there are more devices than KV heads, some devices keep copies.
        copies = max(1, self.num_devices // self.model.kv_heads)
        object.__setattr__(self, "_kv_bytes_per_token", copies * self.model.kv_bytes_per_token)
        object.__setattr__(self, "_bandwidth", self.num_devices * self.device.bandwidth_bytes_s * BANDWIDTH_SHARE)
        object.__setattr__(self, "_layer_params", self.model.layer_params)
        object.__setattr__(self, "_head_params", self.model.head_params)

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
        model, flops = self.model, self.num_devices * self.device.flops
        layers_s = max(
            self._layer_params * BYTES_PER_WEIGHT / self._bandwidth,
            2 * self._layer_params * work.num_rows / (flops * MATMUL_SHARE),
        )
        head_s = max(
            self._head_params * BYTES_PER_WEIGHT / self._bandwidth if work.num_sampled else 0.0,
            2 * self._head_params * work.num_sampled / (flops * MATMUL_SHARE),
        )
        chunks_s = max(
            4 * work.chunk_pairs * model.heads * model.head_dim * model.layers / (flops * ATTENTION_SHARE),
            work.chunk_kv_tokens * self._kv_bytes_per_token / self._bandwidth,
        )
        return STEP_OVERHEAD_S + layers_s + head_s + chunks_s + self._all_reduce_s(work)

    def _all_reduce_s(self, work: StepWork) -> float:
        """Time of the all-reduces: two per layer, over a ring."""
        if self.num_devices == 1:
            return 0.0
        sent = 2 * (self.num_devices - 1) / self.num_devices * work.num_rows * self.model.hidden * BYTES_PER_WEIGHT
        return 2 * self.model.layers * (ALL_REDUCE_LATENCY_S + sent / self.device.link_bytes_s)


def _fewest_devices(device: Device, model: ModelShape) -> int:
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
