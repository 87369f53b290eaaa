"""The peak rates of a device, and the least time that work takes at them.

Rates are those of data sheets: dense products on tensor cores (half of a figure that is given with sparsity).

    A100       NVIDIA A100 Tensor Core GPU datasheet, 2022
    H100       NVIDIA H100 Tensor Core GPU datasheet, 2023; the NVL card's: NVIDIA H100 NVL datasheet, 2024
    H200       NVIDIA H200 Tensor Core GPU datasheet, 2024
    B200       NVIDIA Blackwell (HGX B200) datasheet, 2024
    L4, L40S   NVIDIA L4 Tensor Core GPU datasheet, 2023; NVIDIA L40S datasheet, 2023
    MI300X     AMD Instinct MI300X accelerator data sheet, 2023
"""

from typing import NamedTuple


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
FULL_RATE_DTYPES = ("bfloat16", "float16")  # data sheets give the rate of float32 in units that products may not use


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
