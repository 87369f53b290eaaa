"""The directory of a router that was killed does not stay for ever."""

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from trunkline_router.observe.scraping.snapshot_directory import PREFIX, remove_forgotten, snapshot_directory

HOLD = """
import sys
from trunkline_router.observe.scraping.snapshot_directory import snapshot_directory
with snapshot_directory() as directory:
    (directory / "0.0.snapshot").touch()
    print(directory, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def test_it_lasts_as_long_as_the_router(parent: Path) -> None:
    with snapshot_directory() as directory:
        assert directory.is_dir()
        assert directory.stat().st_mode & 0o077 == 0
    assert list(parent.iterdir()) == []


def test_what_a_killed_router_left_is_removed_by_the_next_one_at_once(parent: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as killed:
        assert killed.stdout is not None
        left = Path(killed.stdout.readline().strip())
        with snapshot_directory() as mine:
            assert {*parent.iterdir()} == {left, mine}, "the router of the other one lives"
        killed.kill()
        killed.wait()
    assert left.is_dir()
    with snapshot_directory() as mine:
        assert list(parent.iterdir()) == [mine]


def test_what_only_looks_like_one_stays(parent: Path) -> None:
    elsewhere = parent / "elsewhere"
    elsewhere.mkdir()
    (parent / f"{PREFIX}link").symlink_to(elsewhere)
    (parent / f"{PREFIX}file").touch()
    remove_forgotten(parent)
    assert len(list(parent.iterdir())) == 3
