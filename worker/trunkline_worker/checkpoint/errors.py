"""What can be wrong with a model directory."""

import json
from typing import Any

MOST_SHOWN = 80  # characters of a value in an error


class ModelError(Exception):
    """The model cannot be served. One line for a person, naming the file or setting."""


def shown(value: Any) -> str:
    """A value from a file as it may stand in an error: ASCII, on one line, at most MOST_SHOWN characters."""
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, dict):
        return f"an object of {len(value)}"
    if isinstance(value, int) and abs(value) >= 1 << 128:
        return f"an integer of {value.bit_length()} bits"  # Python refuses to print the longest ones
    text = json.dumps(value)
    return text if len(text) <= MOST_SHOWN else text[: MOST_SHOWN - 3] + "..."
