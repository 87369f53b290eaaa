"""A change of the key file counts within a second, and a file that cannot be used changes nothing."""

import asyncio
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from tests.router.cluster import PATIENCE_S, until
from tests.router.identity.key_rig import answer, content, put, record, write
from trunkline_router.access.identity import watched_file
from trunkline_router.access.identity.api_keys import ApiKey
from trunkline_router.access.identity.authenticator import Authenticator, KeyFileSource
from trunkline_router.access.identity.identity import IdentityError
from trunkline_router.access.identity.watched_file import POLL_S, WatchedFile
from trunkline_router.access.keys.key_file import changing, present
from trunkline_router.access.keys.new_key import new_key

OLD = 1_000_000_000  # seconds since 1970: a file of that time has settled
WRONG = "the API key is not valid"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


async def started(path: Path) -> tuple[Authenticator, KeyFileSource]:
    source = KeyFileSource(str(path))
    authenticator = Authenticator([source])
    await authenticator.start()
    return authenticator, source


async def test_a_revocation_counts_within_five_seconds_while_the_router_runs(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert POLL_S <= 1.0  # two polls, and the time to read the file
    monkeypatch.setattr(watched_file, "POLL_S", 0.01)
    key = new_key()
    write(path, record(key))
    authenticator, _ = await started(path)
    running = asyncio.create_task(authenticator.run())
    assert answer(authenticator, key.credential) == "acme"
    with changing(path) as entries:
        entries[key.key_id]["revoked"] = "2026-01-01T00:00:00Z"
    async with asyncio.timeout(60):
        await until(lambda: answer(authenticator, key.credential) != "acme")
    assert answer(authenticator, key.credential) == "the API key has been revoked"
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_keys_come_and_go_with_the_file(path: Path) -> None:
    first, second = new_key(), new_key()
    write(path, record(first))
    authenticator, source = await started(path)
    write(path, record(first), record(second))
    await source.poll()
    assert [answer(authenticator, key.credential) for key in (first, second)] == ["acme", "acme"]
    kept = source.records[second.key_id]
    write(path, record(second))
    await source.poll()
    assert [answer(authenticator, key.credential) for key in (first, second)] == [WRONG, "acme"]
    assert source.records[second.key_id] is kept  # an unchanged record is not read again


async def test_a_mount_that_is_swapped_by_symbolic_links_is_followed(tmp_path: Path) -> None:
    """As Kubernetes updates a mounted Secret: keys.json → ..data/keys.json, ..data → a folder for each version."""
    first, second = new_key(), new_key()
    for name, key in (("..1", first), ("..2", second)):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "keys.json", record(key))
        os.utime(tmp_path / name / "keys.json", (OLD, OLD))
    (tmp_path / "..data").symlink_to("..1")
    (tmp_path / "keys.json").symlink_to("..data/keys.json")
    authenticator, source = await started(tmp_path / "keys.json")
    assert answer(authenticator, first.credential) == "acme"
    (tmp_path / "..new").symlink_to("..2")
    os.replace(tmp_path / "..new", tmp_path / "..data")
    await source.poll()
    assert [answer(authenticator, key.credential) for key in (first, second)] == [WRONG, "acme"]


async def test_a_file_that_changes_without_a_difference_in_its_times_or_length_is_read_again(path: Path) -> None:
    first, second = new_key(), new_key()
    write(path, record(first))
    os.utime(path, (OLD, OLD))
    authenticator, source = await started(path)
    write(path, record(second))
    os.utime(path, (OLD, OLD))
    await source.poll()
    assert [answer(authenticator, key.credential) for key in (first, second)] == [WRONG, "acme"]


async def test_content_that_has_not_changed_is_not_handed_on_again(path: Path) -> None:
    reads: list[bytes] = []
    put(path, b"x")
    watched = WatchedFile("--x", str(path), reads.append)
    await watched.start()
    put(path, None)
    put(path, b"x")
    await watched.poll()
    assert reads == [b"x"]


@pytest.mark.parametrize(
    "broken",
    [b"", b"{", b"[]", b"{}", b'{"keys": []}', b'{"keys": {"x": {}}}', b'{"keys": {"aaaaaaaaaaaa": 5}}', b"\xff",
     b'{"keys": {"aaaaaaaaaaaa": {"hash": "x"}}}', b"[" * 100_000, b'{"keys": {}, "keys": {}}',
     b'{"keys": {"a": NaN}}'],
)  # fmt: skip
async def test_a_broken_file_keeps_the_last_good_keys_and_is_logged_once(path: Path, broken: bytes) -> None:
    key, later = new_key(), new_key()
    write(path, record(key))
    authenticator, source = await started(path)
    with capture_logs() as logs:
        put(path, broken)
        for _ in range(3):
            await source.poll()
        assert answer(authenticator, key.credential) == "acme"
        write(path, record(later))
        await source.poll()
    assert [entry["log_level"] for entry in logs] == ["error", "info"]
    assert [answer(authenticator, one.credential) for one in (key, later)] == [WRONG, "acme"]


async def test_a_file_that_is_gone_for_a_time_keeps_its_keys(path: Path) -> None:
    key = new_key()
    write(path, record(key))
    authenticator, source = await started(path)
    with capture_logs() as logs:
        put(path, None)
        await source.poll()
        await source.poll()
        write(path, record(key))
        await source.poll()
    assert [entry["log_level"] for entry in logs] == ["error", "info"]
    assert answer(authenticator, key.credential) == "acme"


@pytest.mark.parametrize("what", ["missing", "folder", "broken", "large"])
async def test_a_router_does_not_start_with_a_file_that_cannot_be_used(
    path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watched_file, "MOST_FILE_BYTES", 1 << 20)
    if what in ("broken", "large"):
        put(path, b"broken" if what == "broken" else b" " * (1 << 21))
    unusable = path.parent if what == "folder" else path
    with pytest.raises(IdentityError, match=f"^--api-keys={unusable}: ") as caught:
        await started(unusable)
    assert "\n" not in str(caught.value)


def test_changing_a_file_keeps_its_permissions_and_its_link(tmp_path: Path, path: Path) -> None:
    key = new_key()
    write(tmp_path / "real.json", record(key))
    (tmp_path / "real.json").chmod(0o640)
    path.symlink_to("real.json")
    before = path.stat().st_ino
    with changing(path) as entries:
        entries[key.key_id]["note"] = "changed"
    assert path.is_symlink()
    assert (tmp_path / "real.json").stat().st_mode & 0o777 == 0o640
    assert path.stat().st_ino != before  # replaced as a whole
    assert present(path)[key.key_id]["note"] == "changed"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["keys.json", "real.json", "real.json.lock"]


def test_a_change_that_fails_leaves_the_file_as_it_was(path: Path) -> None:
    write(path, record(new_key()))
    before = path.read_bytes()
    with pytest.raises(KeyError), changing(path) as entries:
        del entries[next(iter(entries))], entries["unknown"]
    assert path.read_bytes() == before
    path.write_bytes(b"broken")
    with pytest.raises(IdentityError, match="not JSON"), changing(path) as entries:
        entries.clear()
    assert path.read_bytes() == b"broken"


def test_of_ten_thousand_keys_the_unchanged_ones_are_read_once(path: Path) -> None:
    made = [record(ApiKey(f"{number:012}", "b" * 43)) for number in range(10_000)]
    keys = KeyFileSource("unused")
    keys.take(content(*made))
    first = keys.records
    keys.take(content(*made[1:]))
    assert len(first) == 10_000
    assert len(keys.records) == 9_999
    assert all(keys.records[key_id] is first[key_id] for key_id in keys.records)


@pytest.mark.parametrize("what", ["FIFO", "device"])
async def test_a_file_that_is_replaced_by_no_regular_file_keeps_its_keys_and_is_followed(path: Path, what: str) -> None:
    key, later = new_key(), new_key()
    write(path, record(key))
    authenticator, source = await started(path)
    with capture_logs() as logs:
        put(path, None)
        if what == "FIFO":
            os.mkfifo(path)
        else:
            os.symlink("/dev/zero", path)
        for _ in range(2):
            async with asyncio.timeout(PATIENCE_S):
                await source.poll()
        assert answer(authenticator, key.credential) == "acme"
        put(path, None)
        write(path, record(later))
        await source.poll()
    assert [(entry["log_level"], entry.get("problem")) for entry in logs] == [
        ("error", "is not a regular file"), ("info", None),
    ]  # fmt: skip
    assert [answer(authenticator, one.credential) for one in (key, later)] == [WRONG, "acme"]


class HangingRead:
    """Reads a file as from a mount whose server is gone, until it is back."""

    def __init__(self) -> None:
        self.begun: list[bytes] = []
        self.is_back = threading.Event()

    def __call__(self, content: bytes) -> None:
        self.begun.append(content)
        self.is_back.wait()


async def test_a_poll_that_hangs_is_reported_and_the_file_is_followed_again_when_it_ends(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watched_file, "READ_S", 0.01)
    read = HangingRead()
    read.is_back.set()
    put(path, b"1")
    watched = WatchedFile("--x", str(path), read)
    await watched.start()
    read.is_back.clear()
    put(path, b"2")
    with capture_logs() as logs:
        for _ in range(3):
            await watched.poll()
        read.is_back.set()
        monkeypatch.setattr(watched_file, "READ_S", PATIENCE_S)
        await watched.poll()
    assert read.begun == [b"1", b"2"], "while a read hangs, no other one is begun"
    assert [(entry["log_level"], entry.get("problem")) for entry in logs] == [
        ("error", "it cannot be read within 0.01 s"), ("info", None),
    ]  # fmt: skip


async def test_a_router_does_not_start_with_a_file_that_hangs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched_file, "READ_S", 0.01)
    read = HangingRead()
    put(path, b"1")
    with pytest.raises(IdentityError, match=r"^--x: it cannot be read within 0\.01 s$"):
        await WatchedFile("--x", str(path), read).start()
    read.is_back.set()


def test_a_process_ends_while_a_poll_of_its_files_hangs(path: Path) -> None:
    put(path, b"1")
    program = f"""
import asyncio, threading
from trunkline_router.access.identity.watched_file import WatchedFile

begun = threading.Event()

def read(_: bytes) -> None:
    begun.set()
    threading.Event().wait()

async def main() -> None:
    polling = asyncio.create_task(WatchedFile("--x", {str(path)!r}, read).poll())
    while not begun.is_set():
        await asyncio.sleep(0.01)
    polling.cancel()

asyncio.run(main())
"""
    assert subprocess.run([sys.executable, "-c", program], timeout=PATIENCE_S, check=False).returncode == 0
