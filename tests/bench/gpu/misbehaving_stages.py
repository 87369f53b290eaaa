"""Stages that fail in the ways in which stages on a device can fail."""

import os
import signal
import time

from trunkline_bench.gpu.ceilings import Rows
from trunkline_bench.gpu.shapes import Shapes


def works(shapes: Shapes) -> Rows:
    yield {"what": "first"}
    yield {"what": "second"}


def raises(shapes: Shapes) -> Rows:
    yield {"what": "before it raised"}
    raise ValueError("the kernels disagree")


def is_killed(shapes: Shapes) -> Rows:
    yield {"what": "before it was killed"}
    os.kill(os.getpid(), signal.SIGSEGV)


def loses_the_device(shapes: Shapes) -> Rows:
    """As torch reports a sticky error: at the blocking launch, or at any later call."""
    yield {"what": "before the device was lost"}
    where = "at its launch" if os.environ.get("CUDA_LAUNCH_BLOCKING") == "1" else "later"
    raise RuntimeError(f"CUDA error: an illegal memory access was encountered, noticed {where}")


def hangs(shapes: Shapes) -> Rows:
    yield {"what": "before it hung"}
    time.sleep(600)
