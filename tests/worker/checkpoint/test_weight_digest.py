"""Every byte of every weight file decides the fingerprint, and digests end when loading does."""

import threading
from pathlib import Path

import pytest
import xxhash

from trunkline_worker.model.checkpoint.refusals import ModelError
from trunkline_worker.model.checkpoint.weight_digest import CHUNK_BYTES, WeightDigests

SIZES = [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, 2 * CHUNK_BYTES + 7]


def files_of(directory: Path) -> list[Path]:
    files = [directory / f"{index}.safetensors" for index in range(len(SIZES))]
    for file, size in zip(files, SIZES, strict=True):
        file.write_bytes(bytes([size % 251]) * size)
    return files


def reading_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("weight-digest")]


def test_digests_are_of_whole_files_in_their_order(tmp_path: Path) -> None:
    files = files_of(tmp_path)
    with WeightDigests(files) as digests:
        assert digests.digests() == [xxhash.xxh3_128(file.read_bytes()).digest() for file in files]


def test_any_byte_changes_its_files_digest_alone(tmp_path: Path) -> None:
    files = files_of(tmp_path)
    with WeightDigests(files) as digests:
        before = digests.digests()
    for at in (0, CHUNK_BYTES - 1, CHUNK_BYTES, SIZES[-1] - 1):
        with files[-1].open("r+b") as file:
            file.seek(at)
            file.write(b"\xff")
        with WeightDigests(files) as digests:
            after = digests.digests()
        assert [old == new for old, new in zip(before, after, strict=True)] == [True, True, True, True, False]
        before = after


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with WeightDigests([*files_of(tmp_path), tmp_path]) as digests, pytest.raises(ModelError, match="cannot be read"):
        digests.digests()


def test_threads_end_when_loading_fails(tmp_path: Path) -> None:
    """Reading this file to its end would take minutes."""
    sparse = tmp_path / "model.safetensors"
    with sparse.open("wb") as file:
        file.truncate(1 << 40)
    with WeightDigests([sparse]):
        assert reading_threads()
    assert reading_threads() == []
