"""Selects the table of tilings that engines of this process read."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trunkline_kernels.gpu import tuned_tilings


@contextmanager
def using_table(file: Path) -> Iterator[None]:
    """Decoders created inside the context read their tilings from this file."""
    before = os.environ.get(tuned_tilings.VARIABLE)
    os.environ[tuned_tilings.VARIABLE] = str(file)
    try:
        yield
    finally:
        del os.environ[tuned_tilings.VARIABLE]
        if before is not None:
            os.environ[tuned_tilings.VARIABLE] = before
