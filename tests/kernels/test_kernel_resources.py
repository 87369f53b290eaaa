"""The Triton kernels compile for every chip, without a GPU: no spills, enough shared memory, tensor cores used."""

import os
import subprocess
import sys


def test_kernels_compile_for_every_chip() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "trunkline_bench.kernel_resources"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for chip in ("sm_80", "sm_90", "sm_100", "gfx942"):
        assert f"{chip} · decode attention · `_attend_pieces`" in done.stdout
