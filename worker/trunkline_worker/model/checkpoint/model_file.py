"""Reads files of a model directory, any of which may be missing, damaged or not a regular file."""

import json
import os
from pathlib import Path
from typing import Any

from trunkline_worker.model.checkpoint.refusals import ModelError

MOST_BYTES = 64 << 20  # the largest tokenizers take half of it, the indices of the largest checkpoints a few MiB


def read_file(path: Path) -> bytes:
    """Returns a regular file's contents. Raises ModelError with the file's name if it cannot be read."""
    try:
        path.lstat()
    except FileNotFoundError:
        raise ModelError(f"{path} is missing") from None
    except OSError as error:  # a parent directory may not be accessible
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
    """Returns a file's JSON object. Raises ModelError with the file's name if it has none."""
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
