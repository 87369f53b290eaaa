"""JSON objects from a model directory, where any file may be damaged or not a file at all."""

import json
import os
from pathlib import Path
from typing import Any

from trunkline_worker.model.errors import ModelError

MOST_BYTES = 64 << 20  # the index of the largest checkpoints takes a few MiB


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises ModelError naming the file."""
    try:
        path.lstat()
    except FileNotFoundError:
        raise ModelError(f"{path} is missing") from None
    except OSError as error:  # a folder on the way to it may be closed
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None
    if not os.path.isfile(path):
        raise ModelError(f"{path} cannot be read: it is a directory, a link to nothing, or not a regular file")
    try:
        if (size := path.stat().st_size) > MOST_BYTES:
            raise ModelError(f"{path} cannot be read: its {size} bytes are more than {MOST_BYTES}")
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:  # not JSON, not UTF-8, or an integer with thousands of digits
        raise ModelError(f"{path} cannot be read: {error}") from None
    except RecursionError:
        raise ModelError(f"{path} cannot be read: it is nested too deeply") from None
    if not isinstance(data, dict):
        raise ModelError(f"{path} holds no JSON object")
    return data
