"""What is told of a worker's GPU, with NVIDIA's binding and a library of the same interface in the place of the
driver's. A process loads such a library only once, so each test has its own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

SOURCE = Path(__file__).parent / "nvml.c"
SAMPLES = """
import json, os, sys
from trunkline_runtime.telemetry.gpu_meter import GpuMeter
meter = GpuMeter.open(sys.argv[1])
found = [meter and meter.sample()._asdict()]
os.environ["NVML_LOST"] = "1"
print(json.dumps([*found, meter and meter.sample()._asdict()]))
"""
SCRAPES = """
import asyncio, os, sys
from trunkline.v1.worker_pb2 import GetModelResponse
from trunkline_runtime.loop_lag import LoopLag
from trunkline_runtime.telemetry.exposition import content_type_of, exposition
from trunkline_runtime.telemetry.gpu_meter import GpuMeter
from trunkline_worker.front.metrics_port import MetricsSources
from trunkline_worker.front.session import Backlog
from trunkline_worker.front.telemetry.worker_metrics import WorkerMetrics

async def scrape(sources):
    print((await exposition(await sources.collect(), content_type_of(""))).decode(), end="\\0")

async def main():
    gpu = GpuMeter.open(sys.argv[1])
    sources = MetricsSources(WorkerMetrics(GetModelResponse()), LoopLag(), Backlog(), gpu=gpu)
    await scrape(sources)
    os.environ["NVML_LOST"] = "1"
    await scrape(sources)

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a libnvidia-ml.so.1."""
    folder = tmp_path_factory.mktemp("nvml")
    target = folder / "libnvidia-ml.so.1"
    compiler = os.environ.get("CC", "cc")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", target, SOURCE], check=True, timeout=60)
    return folder


def output(script: str, uuid: str, library: Path | None, **environment: str) -> str:
    """What a process prints that finds NVML in a folder; None: where the system has it, if it has."""
    found = {} if library is None else {"LD_LIBRARY_PATH": str(library)}
    command = [sys.executable, "-W", "error", "-c", script, uuid]
    return subprocess.run(
        command, env={**os.environ, **found, **environment}, check=True, stdout=subprocess.PIPE, text=True, timeout=60
    ).stdout


def samples(uuid: str, library: Path | None, **environment: str) -> list[dict[str, Any] | None]:
    """A sample, and one after the device was lost."""
    found: list[dict[str, Any] | None] = json.loads(output(SAMPLES, uuid, library, **environment))
    return found


def test_of_two_gpus_only_the_workers_own_is_metered(library: Path) -> None:
    # Which GPUs CUDA sees, and in which order, changes nothing: NVML counts all of the machine.
    first, lost = samples("bbbb", library, CUDA_VISIBLE_DEVICES="1")
    assert first == {
        "gpu": "1", "name": "NVIDIA L4", "busy_ratio": 0.9, "memory_busy_ratio": 0.55, "memory_used_bytes": 7e9,
        "memory_total_bytes": 24e9, "power_w": 71.25, "temperature_c": 63,
    }  # fmt: skip
    assert lost == {"gpu": "1", "name": "NVIDIA L4", **dict.fromkeys(list(first)[2:])}


def test_a_part_of_a_divided_gpu_tells_what_it_knows(library: Path) -> None:
    part = samples("cccc", library)[0]
    assert part is not None
    assert (part["name"], part["memory_used_bytes"], part["temperature_c"]) == ("NVIDIA L4 MIG 1g.6gb", 7e9, 63)
    assert part["busy_ratio"] is part["memory_busy_ratio"] is part["power_w"] is None


def test_a_device_without_power_readings_tells_the_rest(library: Path) -> None:
    sample = samples("aaaa", library, NVML_NO_POWER="1")[0]
    assert sample is not None
    assert sample["power_w"] is None
    assert (sample["busy_ratio"], sample["memory_busy_ratio"]) == (0.1, 0.2)


@pytest.mark.parametrize("without", ["NVML_NO_DRIVER", "NVML_NO_DEVICE"])
def test_without_a_driver_or_a_device_there_is_no_meter(library: Path, without: str) -> None:
    assert samples("aaaa", library, **{without: "1"}) == [None, None]


def test_without_a_library_or_a_gpu_there_is_no_meter(library: Path) -> None:
    assert samples("aaaa", None) == [None, None], "no NVML, or no such GPU"
    assert samples("", library) == [None, None], "the worker computes on a CPU"


def test_a_scrape_survives_the_loss_of_the_device(library: Path) -> None:
    before, after, _ = output(SCRAPES, "aaaa", library).split("\0")
    told = {
        sample.name: (sample.labels, sample.value)
        for family in text_string_to_metric_families(before)
        for sample in family.samples
        if sample.name.startswith("trunkline_gpu_")
    }
    labels = {"gpu": "0", "name": "NVIDIA H200"}
    assert told == {
        "trunkline_gpu_busy_ratio": (labels, 0.1),
        "trunkline_gpu_memory_busy_ratio": (labels, 0.2),
        "trunkline_gpu_memory_used_bytes": (labels, 7e9),
        "trunkline_gpu_memory_total_bytes": (labels, 24e9),
        "trunkline_gpu_power_watts": (labels, 300.5),
        "trunkline_gpu_temperature_celsius": (labels, 41.0),
    }
    families = {family.name: family.samples for family in text_string_to_metric_families(after)}
    assert all(families[name] == [] for name in told)
    assert families["trunkline_worker_outbox_bytes"], "the rest is told"
