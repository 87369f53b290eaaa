"""How a router and its helper processes talk: frames over one socket, a question and its answer at a time.

A frame is the length of its body, its kind, the name of what the body is for, and the body. What kinds there are, each
helper process says; the first frame that it sends is READY.
"""

import struct
from typing import BinaryIO

HEADER = struct.Struct("<IB32s")  # bytes of the body, kind, a digest as name
READY = 3
REFUSED = 5  # a RequestError


def write_frame(writer: BinaryIO, kind: int, body: bytes) -> None:
    """An answer, or READY: neither needs a name."""
    writer.write(HEADER.pack(len(body), kind, b""))
    writer.write(body)
    writer.flush()
