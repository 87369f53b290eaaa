"""The least work of a step of a decoder, and the least time that it takes at a device's peak rates.

A step reads the layers' weights once, of experts those that its tokens use on average, the head's if it computes
logits, and the keys and values of each sequence's context; it writes those of its new tokens. Products take two
operations for each parameter and row, attention four for each (query, key) pair and each element of a query head.
Activations, norms and embedding rows are left out: they are small, and can stay on the chip.

Rates are those of data sheets: dense products on tensor cores (half of a figure that is given with sparsity).

    A100       NVIDIA A100 Tensor Core GPU datasheet, 2022
    H100       NVIDIA H100 Tensor Core GPU datasheet, 2023; the NVL card's: NVIDIA H100 NVL datasheet, 2024
    H200       NVIDIA H200 Tensor Core GPU datasheet, 2024
    B200       NVIDIA Blackwell (HGX B200) datasheet, 2024
    L4, L40S   NVIDIA L4 Tensor Core GPU datasheet, 2023; NVIDIA L40S datasheet, 2023
    MI300X     AMD Instinct MI300X accelerator data sheet, 2023
"""

from collections.abc import Iterable
from typing import NamedTuple

from trunkline_kernels.routing_rule import RoutingRule
from trunkline_worker.step.plan import SequenceStep

FULL_RATE_DTYPES = ("bfloat16", "float16")  # data sheets give the rate of float32 in units that products may not use


def pair_flops(heads: int, head_dim: int) -> int:
    """Operations of one (query, key) pair in one layer."""
    return 4 * heads * head_dim


def kv_token_bytes(kv_heads: int, head_dim: int, itemsize: int) -> int:
    """Bytes of the keys and values of one token in one layer."""
    return 2 * kv_heads * head_dim * itemsize


class Attended(NamedTuple):
    """What the attention of a step works on, a mean over layers: windows bound it in some of them."""

    kv_tokens: float  # contexts, summed
    pairs: float  # (query, key) pairs


class StepWork(NamedTuple):
    """The least work of one step."""

    num_bytes: float
    flops: float


class ModelWork(NamedTuple):
    """What the work of a model's steps depends on."""

    layer_params: int  # of the matrices of all layers; of experts, those that one token uses
    head_params: int
    layer_bytes: int  # weights of all layers, without experts
    head_bytes: int
    kv_token_bytes: int  # keys and values of one token, in all layers
    pair_flops: int  # of a (query, key) pair, in all layers
    windows: tuple[int | None, ...] = (None,)  # by layer; None: all positions
    expert_bytes: int = 0  # of all experts of all layers
    routing: RoutingRule | None = None  # None: no layer has experts

    @property
    def has_windows(self) -> bool:
        return any(window is not None for window in self.windows)

    def layer_flops(self, rows: float) -> float:
        """Operations of the products of all layers."""
        return 2.0 * self.layer_params * rows

    def read_bytes(self, rows: float) -> float:
        """Bytes of the layers' weights that a step of so many rows reads."""
        return self.layer_bytes + (0.0 if self.routing is None else self.routing.used_share(rows) * self.expert_bytes)

    def head_flops(self, rows: float) -> float:
        """Operations of the logits of some rows."""
        return 2.0 * self.head_params * rows

    def attention_flops(self, pairs: float) -> float:
        return self.pair_flops * pairs

    def step(self, num_tokens: int, num_logits: int, attended: Attended) -> StepWork:
        """The work of a step with new tokens, of which `num_logits` need logits."""
        weights = self.read_bytes(num_tokens) + (self.head_bytes if num_logits else 0)
        return StepWork(
            weights + self.kv_token_bytes * (attended.kv_tokens + num_tokens),
            self.layer_flops(num_tokens) + self.head_flops(num_logits) + self.attention_flops(attended.pairs),
        )

    def attended(self, steps: Iterable[SequenceStep]) -> Attended:
        """What the entries of a plan attend to. A loop over them: for models with windows."""
        kinds = {window: self.windows.count(window) / len(self.windows) for window in set(self.windows)}
        kv_tokens = pairs = 0.0
        for step in steps:
            context = step.num_computed + step.num_new
            for window, share in kinds.items():
                within = context if window is None else min(context, window - 1 + step.num_new)
                kv_tokens += share * within
                pairs += share * num_pairs(step.num_computed, step.num_new, window)
        return Attended(kv_tokens, pairs)


def num_pairs(num_computed: int, num_new: int, window: int | None = None) -> float:
    """(query, key) pairs of new tokens after computed ones: each token sees those before it, and itself."""
    growing = num_new if window is None else min(max(window - num_computed, 0), num_new)
    full = (num_new - growing) * window if window is not None else 0
    return growing * (num_computed + (growing + 1) / 2) + full


class DataSheet(NamedTuple):
    """What a data sheet tells of one device."""

    flops: float  # per second; bfloat16 and float16 alike
    fp8_flops: float | None  # per second; None: without fp8
    bytes_per_s: float  # of its memory


# By the name that torch reports. A part of a divided GPU (MIG) has another name, and its rates are not known.
DATA_SHEETS = {
    "NVIDIA A100-SXM4-40GB": DataSheet(312e12, None, 1.555e12),
    "NVIDIA A100-PCIE-40GB": DataSheet(312e12, None, 1.555e12),
    "NVIDIA A100-SXM4-80GB": DataSheet(312e12, None, 2.039e12),
    "NVIDIA A100 80GB PCIe": DataSheet(312e12, None, 1.935e12),
    "NVIDIA H100 80GB HBM3": DataSheet(989e12, 1979e12, 3.35e12),
    "NVIDIA H100 PCIe": DataSheet(756e12, 1513e12, 2.0e12),
    "NVIDIA H100 NVL": DataSheet(835e12, 1671e12, 3.9e12),
    "NVIDIA H200": DataSheet(989e12, 1979e12, 4.8e12),
    "NVIDIA B200": DataSheet(2250e12, 4500e12, 8.0e12),
    "NVIDIA L4": DataSheet(121e12, 242e12, 0.3e12),
    "NVIDIA L40S": DataSheet(362e12, 733e12, 0.864e12),
    "AMD Instinct MI300X": DataSheet(1307e12, 2615e12, 5.3e12),
}


class PeakRates(NamedTuple):
    """None: not known."""

    flops: float | None = None  # per second
    bytes_per_s: float | None = None

    def least_s(self, num_bytes: float, flops: float) -> float | None:
        """The least time for work, by the rates that are known; None if none is."""
        times_s = [
            amount / rate for amount, rate in ((num_bytes, self.bytes_per_s), (flops, self.flops)) if rate is not None
        ]
        return max(times_s) if times_s else None


def peak_rates(
    device_name: str, *, dtype: str, quantization: str, tflops: float | None, gb_per_s: float | None
) -> PeakRates:
    """The rates of a device by its data sheet, unless settings give them.

    device_name: as torch reports it; empty: no GPU
    quantization: as in EngineSettings; only with fp8 are products computed in another type than dtype
    """
    flops = bytes_per_s = None
    sheet = DATA_SHEETS.get(device_name)
    if sheet is not None:
        bytes_per_s = sheet.bytes_per_s
        if dtype in FULL_RATE_DTYPES:
            flops = sheet.fp8_flops if quantization == "fp8" and sheet.fp8_flops else sheet.flops
    return PeakRates(
        flops if tflops is None else tflops * 1e12,
        bytes_per_s if gb_per_s is None else gb_per_s * 1e9,
    )
