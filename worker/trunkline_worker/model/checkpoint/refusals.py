"""The error of a model directory that cannot be served."""

import json
from typing import Any

MOST_SHOWN = 80  # characters of a value in an error


class ModelError(Exception):
    """The model cannot be served. The message is one line that names the file or setting."""


def shown(value: Any) -> str:
    """Returns a value from a file for an error message: ASCII, one line, at most MOST_SHOWN characters."""
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, dict):
        return f"an object of {len(value)}"
    if isinstance(value, int) and abs(value) >= 1 << 128:
        return f"an integer of {value.bit_length()} bits"  # Python refuses to print the longest ones
    text = json.dumps(value, default=str)
    return text if len(text) <= MOST_SHOWN else text[: MOST_SHOWN - 3] + "..."
