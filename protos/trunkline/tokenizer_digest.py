"""The digest by which routers know that workers have the same tokenizer files."""

from collections.abc import Mapping

from xxhash import xxh3_128


def tokenizer_digest(files: Mapping[str, bytes]) -> bytes:
    """GetModelResponse.tokenizer_digest of files by name, in the order in which they are sent: 16 bytes."""
    digest = xxh3_128()
    for name, data in files.items():
        digest.update(f"{name}:{len(data)}:".encode() + data)
    return digest.digest()
