"""How an engine on a CPU keeps memory."""

import subprocess
import sys

import pytest

STEPS = """
import ctypes, resource, sys, threading
from trunkline_worker.engine.allocator import keep_freed_memory, use_one_arena
if sys.argv[1] == "kept":
    use_one_arena()
    keep_freed_memory()
def steps():
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        parts = [bytearray(8 << 20) for _ in range(20)]
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        del parts
    print(faults)
thread = threading.Thread(target=steps)
thread.start()
thread.join()
"""


def faults_of_a_step(how: str) -> int:
    """Page faults of the last of five steps on a thread, each of which takes 160 MiB and frees them."""
    done = subprocess.run([sys.executable, "-c", STEPS, how], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no glibc")
def test_a_step_uses_the_memory_of_the_step_before() -> None:
    assert faults_of_a_step("default") > 10_000
    assert faults_of_a_step("kept") < 1_000
