"""Files of a model directory, where any may be damaged, or no file at all."""

import json
import os
from pathlib import Path
from typing import Any

from trunkline_worker.checkpoint.errors import ModelError

MOST_BYTES = 64 << 20  # the largest tokenizers take half of it, the indices of the largest checkpoints a few MiB


def read_file(path: Path) -> bytes:
    """A regular file's contents. Raises ModelError naming the file."""
    try:
        path.lstat()
    except FileNotFoundError:
        raise ModelError(f"{path} is missing") from None
    except OSError as error:  # a folder on the way to it may be closed
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None
    if not os.path.isfile(path):
        raise ModelError(f"{path} cannot be read: it is a directory, a link to nothing, or not a regular file")
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None
    if len(data) > MOST_BYTES:
        raise ModelError(f"{path} cannot be read: it has more than {MOST_BYTES} bytes")
    return data


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises ModelError naming the file."""
    data = read_file(path)
    try:
        value = json.loads(data.decode())
    except ValueError as error:  # not JSON, not UTF-8, or an integer with thousands of digits
        raise ModelError(f"{path} cannot be read: {error}") from None
    except RecursionError:
        raise ModelError(f"{path} cannot be read: it is nested too deeply") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds no JSON object")
    return value
