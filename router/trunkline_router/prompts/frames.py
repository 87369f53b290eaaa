"""The protocol between a router and its helper processes: frames over one socket, one request at a time.

A frame is the length of its body, its kind, the name (digest) of the template or tokenizer that it is about, and the
body. Each helper process defines its kinds. The first frame that it sends is READY.
"""

import struct
from typing import BinaryIO

HEADER = struct.Struct("<IB32s")  # body length, kind, name
READY = 3
REFUSED = 5  # a RequestError


def write_frame(writer: BinaryIO, kind: int, body: bytes) -> None:
    """Writes an answer or READY, which have no name."""
    writer.write(HEADER.pack(len(body), kind, b""))
    writer.write(body)
    writer.flush()
