"""The Triton kernels compile for every chip, without a GPU: no spills, enough shared memory, tensor cores used."""

import os
import subprocess
import sys

import pytest


# A chip takes the compiler half a minute and more, the first time on a machine.
@pytest.mark.slow
@pytest.mark.parametrize("chip", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_kernels_compile_for_every_chip(chip: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "trunkline_bench.kernels.resources", "--targets", chip]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"{chip} · decode attention · `_attend_ranges`" in done.stdout
