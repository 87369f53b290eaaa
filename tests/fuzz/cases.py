"""Cases that have failed once, as files: their bytes, with a line between writes."""

from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path

CORPUS = Path(__file__).parent / "corpus"
NEXT_WRITE = b"\n--- next write ---\n"

Writes = Sequence[bytes]


def kept(kind: str, writes: Writes) -> Path:
    """Adds a case to the corpus. Returns its file."""
    data = NEXT_WRITE.join(writes)
    path = CORPUS / kind / f"{sha256(data).hexdigest()[:12]}.bin"
    path.write_bytes(data)
    return path


def read(path: Path) -> Writes:
    return path.read_bytes().split(NEXT_WRITE)


def smaller(writes: Writes, fails: Callable[[Writes], bool]) -> Writes:
    """A case with fewer bytes that fails too: parts of it are left out while it goes on failing."""
    whole = b"".join(writes)
    if not fails([whole]):
        return writes
    size = len(whole) // 2
    while size:
        at = 0
        while at < len(whole):
            shorter = whole[:at] + whole[at + size :]
            if shorter and fails([shorter]):
                whole = shorter
            else:
                at += size
        size //= 2
    return [whole]
