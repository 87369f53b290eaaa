"""Local workers get one GPU each, in turn, and share its memory if there are more workers than GPUs."""

from pathlib import Path

import pytest

from trunkline_cli.gpus import gpu_environment, memory_share, visible_gpus
from trunkline_cli.passed_flags import PassedFlags
from trunkline_cli.plan import ClusterPlan

NVIDIA_SMI = """#!/bin/sh
echo 0
echo 1
"""


def test_what_the_environment_says_goes_before_the_driver() -> None:
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "2, GPU-8a"}) == ("2", "GPU-8a")
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}) == ()
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "-1"}) == ()


@pytest.mark.parametrize(("body", "expected"), [(NVIDIA_SMI, ("0", "1")), ("#!/bin/sh\nexit 9\n", ())])
def test_the_driver_is_asked(
    body: str, expected: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(body)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert visible_gpus({}) == expected


def test_without_a_driver_there_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert visible_gpus({}) == ()


def test_workers_share_gpus_out() -> None:
    assert [gpu_environment(("0", "1"), index) for index in range(3)] == [
        {"CUDA_VISIBLE_DEVICES": gpu} for gpu in ("0", "1", "0")
    ]
    assert gpu_environment((), 0) == {}
    assert [memory_share(("0", "1"), 3, index) for index in range(3)] == [0.5, None, 0.5]
    assert memory_share((), 3, 0) is None


def test_a_plan_tells_workers_their_share() -> None:
    flags = PassedFlags(workers=("--gpu-memory-share=0.3",))
    plan = ClusterPlan(Path("m"), "m", 2, "127.0.0.1", 50051, 50061, flags, 1, ("0",))
    command = plan.worker_command(1)
    # The last flag wins, so the user's flag overrides the launcher's.
    assert command.index("--gpu-memory-share=0.5") < command.index("--gpu-memory-share=0.3")
    assert plan.environment("worker-1") == {"CUDA_VISIBLE_DEVICES": "0", "GOMP_SPINCOUNT": "1000"}


def test_an_operators_number_of_spins_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = ClusterPlan(Path("m"), "m", 1, "127.0.0.1", 1, 2, threads=1)
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    assert plan.environment("worker-0")["GOMP_SPINCOUNT"] == "1000"
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    assert "GOMP_SPINCOUNT" not in plan.environment("worker-0")
