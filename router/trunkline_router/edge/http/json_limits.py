"""Limits on what a JSON body contains, checked on its bytes.

A byte of a text costs the parser a few nanoseconds. A list costs up to 300, a name up to 900, and each takes tens of
bytes of memory. So their numbers are bounded, and the parser needs no pauses: the costliest body takes 0.07 s on a slow
core and 52 MiB of memory.
"""

from trunkline.status import RequestRefused, invalid
from trunkline_router.prompts.chat_template import MAX_MESSAGES

MAX_CONTAINERS = 8 * MAX_MESSAGES  # lists and objects; a message may have several parts and tool calls
MAX_STRINGS = 16 * MAX_MESSAGES  # names and values
MAX_VALUES = 1 << 20  # a prompt of a million token ids, and 48,000 other values
ALWAYS_WITHIN_BYTES = 2 * MAX_CONTAINERS  # a body up to this size is within all limits


def check_limits(raw: bytes) -> None:
    """Raises RequestRefused (INVALID_REQUEST) if JSON has too many values. Malformed JSON may pass, but what comes
    before its first error is within the limits."""
    if len(raw) <= ALWAYS_WITHIN_BYTES:
        return
    if b"\\" in raw:  # without escaped quotes, every quote begins or ends a string
        raw = raw.replace(b"\\\\", b"..").replace(b'\\"', b"..")
    if raw.count(b'"') > 2 * MAX_STRINGS:
        raise _too_many("strings", MAX_STRINGS)
    outside = b"".join(raw.split(b'"')[::2])
    containers = outside.count(b"[") + outside.count(b"{")
    if containers > MAX_CONTAINERS:
        raise _too_many("lists and objects", MAX_CONTAINERS)
    if outside.count(b",") + containers > MAX_VALUES:
        raise _too_many("values", MAX_VALUES)


def _too_many(what: str, most: int) -> RequestRefused:
    return invalid("body", f"has more than {most} {what}")
