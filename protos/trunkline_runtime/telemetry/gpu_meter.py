"""What NVML tells of a process's GPUs: utilisation, memory, power and temperature."""

from collections.abc import Iterable
from importlib import import_module
from typing import Any, NamedTuple

from prometheus_client.core import Metric

from trunkline_runtime.telemetry.exposition import gauge


class GpuSample(NamedTuple):
    """One GPU now. None: the device does not tell."""

    gpu: str  # its number
    name: str
    busy_ratio: float | None  # share of time in which a kernel ran
    memory_busy_ratio: float | None  # share of time in which device memory was read or written
    memory_used_bytes: float | None
    memory_total_bytes: float | None
    power_w: float | None
    temperature_c: float | None


class GpuMeter:
    """open() returns None where there is no NVML or no device; that costs nothing further."""

    def __init__(self, nvml: Any, num_devices: int) -> None:
        self._nvml = nvml
        self._handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(num_devices)]

    @classmethod
    def open(cls) -> "GpuMeter | None":
        try:
            nvml = import_module("pynvml")
        except ImportError:
            return None
        try:
            nvml.nvmlInit()
            count = nvml.nvmlDeviceGetCount()
            return cls(nvml, count) if count else None
        except nvml.NVMLError:
            return None

    def samples(self) -> list[GpuSample]:
        """One per device. May take milliseconds: call it on a thread."""
        return [self._sample(index, handle) for index, handle in enumerate(self._handles)]

    def _sample(self, index: int, handle: Any) -> GpuSample:
        nvml = self._nvml
        rates = self._ask(nvml.nvmlDeviceGetUtilizationRates, handle)
        memory = self._ask(nvml.nvmlDeviceGetMemoryInfo, handle)
        milliwatts = self._ask(nvml.nvmlDeviceGetPowerUsage, handle)
        name = self._ask(nvml.nvmlDeviceGetName, handle) or ""
        return GpuSample(
            gpu=str(index),
            name=name.decode() if isinstance(name, bytes) else name,
            busy_ratio=None if rates is None else rates.gpu / 100,
            memory_busy_ratio=None if rates is None else rates.memory / 100,
            memory_used_bytes=None if memory is None else memory.used,
            memory_total_bytes=None if memory is None else memory.total,
            power_w=None if milliwatts is None else milliwatts / 1000,
            temperature_c=self._ask(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
        )

    def _ask(self, question: Any, *arguments: Any) -> Any:
        try:
            return question(*arguments)
        except self._nvml.NVMLError:
            return None


def gpu_families(samples: list[GpuSample]) -> Iterable[Metric]:
    """Metrics of devices; those that no device tells are left out."""
    for name, documentation, field in (
        ("trunkline_gpu_busy_ratio", "Share of time in which a kernel ran.", "busy_ratio"),
        (
            "trunkline_gpu_memory_busy_ratio",
            "Share of time in which device memory was read or written: use of its bandwidth.",
            "memory_busy_ratio",
        ),
        ("trunkline_gpu_memory_used_bytes", "Device memory in use.", "memory_used_bytes"),
        ("trunkline_gpu_memory_total_bytes", "Device memory.", "memory_total_bytes"),
        ("trunkline_gpu_power_watts", "Power drawn.", "power_w"),
        ("trunkline_gpu_temperature_celsius", "Temperature.", "temperature_c"),
    ):
        values = [((sample.gpu, sample.name), getattr(sample, field)) for sample in samples]
        known = [(labels, float(value)) for labels, value in values if value is not None]
        if known:
            yield gauge(name, documentation, ("gpu", "name"), known)
