"""What NVML tells of a process's GPU: utilisation, memory, power and temperature."""

from collections.abc import Iterable
from importlib import import_module
from typing import Any, NamedTuple

from prometheus_client.core import Metric

from trunkline_runtime.telemetry.series import gauge

UUID_PREFIXES = ("GPU-", "MIG-")  # of a whole GPU, and of a part of a divided one


class GpuSample(NamedTuple):
    """One GPU now. None: the device does not tell."""

    gpu: str  # its number, as NVML counts
    name: str
    busy_ratio: float | None  # share of time in which a kernel ran
    memory_busy_ratio: float | None  # share of time in which device memory was read or written
    memory_used_bytes: float | None
    memory_total_bytes: float | None
    power_w: float | None
    temperature_c: float | None


NO_GPU = GpuSample("", "", None, None, None, None, None, None)


class GpuMeter:
    """Meters one GPU, whichever others the machine has. NVML's order is not CUDA's, and CUDA_VISIBLE_DEVICES does not
    change it, so that only its UUID finds the GPU on which a process computes."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml = nvml
        self._handle = handle
        index = self._ask(nvml.nvmlDeviceGetIndex, handle)
        self._gpu = "" if index is None else str(index)
        self._name: str = self._ask(nvml.nvmlDeviceGetName, handle) or ""

    @classmethod
    def open(cls, uuid: str) -> "GpuMeter | None":
        """The meter of a GPU; None where it or NVML is not found.

        uuid: as CUDA gives it, without a prefix; empty: the process computes on no GPU
        """
        if not uuid:
            return None
        try:
            nvml = import_module("pynvml")
        except ImportError:
            return None
        try:
            nvml.nvmlInit()
        except nvml.NVMLError:
            return None
        for prefix in UUID_PREFIXES:
            try:
                return cls(nvml, nvml.nvmlDeviceGetHandleByUUID(prefix + uuid))
            except nvml.NVMLError:
                continue
        nvml.nvmlShutdown()
        return None

    def sample(self) -> GpuSample:
        """May take milliseconds: call it on a thread. A device that fails tells nothing; that is no error here."""
        nvml, handle = self._nvml, self._handle
        rates = self._ask(nvml.nvmlDeviceGetUtilizationRates, handle)
        memory = self._ask(nvml.nvmlDeviceGetMemoryInfo, handle)
        milliwatts = self._ask(nvml.nvmlDeviceGetPowerUsage, handle)
        return GpuSample(
            gpu=self._gpu,
            name=self._name,
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


def gpu_families(sample: GpuSample) -> Iterable[Metric]:
    """Metrics of a GPU. What it does not tell has no samples."""
    for name, documentation, value in (
        ("trunkline_gpu_busy_ratio", "Share of time in which a kernel ran.", sample.busy_ratio),
        (
            "trunkline_gpu_memory_busy_ratio",
            "Share of time in which device memory was read or written: use of its bandwidth.",
            sample.memory_busy_ratio,
        ),
        ("trunkline_gpu_memory_used_bytes", "Device memory in use, by all processes.", sample.memory_used_bytes),
        ("trunkline_gpu_memory_total_bytes", "Device memory.", sample.memory_total_bytes),
        ("trunkline_gpu_power_watts", "Power drawn.", sample.power_w),
        ("trunkline_gpu_temperature_celsius", "Temperature.", sample.temperature_c),
    ):
        known = [] if value is None else [((sample.gpu, sample.name), float(value))]
        yield gauge(name, documentation, ("gpu", "name"), known)
