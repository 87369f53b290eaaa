"""Reads files of a model directory, any of which may be missing, damaged or not a regular file.

A GGUF file counts as a directory: its metadata says what config.json, generation_config.json, tokenizer.json and
tokenizer_config.json would.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trunkline_worker.model.checkpoint.gguf_config import config_of, sampling_of
from trunkline_worker.model.checkpoint.gguf_file import GgufFile, is_gguf
from trunkline_worker.model.checkpoint.gguf_tokenizer import tokenizer_config_of, tokenizer_of
from trunkline_worker.model.checkpoint.refusals import ModelError

MOST_BYTES = 64 << 20  # the largest tokenizers take half of it, the indices of the largest checkpoints a few MiB
IN_GGUF: dict[str, Callable[[GgufFile], dict[str, Any]]] = {
    "config.json": config_of,
    "generation_config.json": sampling_of,
    "tokenizer.json": tokenizer_of,
    "tokenizer_config.json": tokenizer_config_of,
}


def exists(path: Path) -> bool:
    """Whether there is such a file, which may still be one that cannot be read."""
    return path.name in IN_GGUF if is_gguf(path.parent) else os.path.lexists(path)


def read_file(path: Path) -> bytes:
    """Returns a regular file's contents. Raises ModelError with the file's name if it cannot be read."""
    if is_gguf(path.parent):
        return json.dumps(IN_GGUF[path.name](GgufFile(path.parent)), default=str).encode()
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
