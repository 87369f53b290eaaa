"""The digest by which routers compare the tokenizer files of workers."""

from collections.abc import Mapping

from xxhash import xxh3_128


def tokenizer_digest(files: Mapping[str, bytes]) -> bytes:
    """GetModelResponse.tokenizer_digest (16 bytes) of files by name, in the order in which they are sent."""
    digest = xxh3_128()
    for name, data in files.items():
        digest.update(f"{name}:{len(data)}:".encode() + data)
    return digest.digest()
