"""Files in which the processes of one router tell each other their metrics.

Each process writes a snapshot of its metrics every SNAPSHOT_S into a private directory of their parent, and again when
it is scraped. An answer to a scraper is made of these files alone. So:

- Whichever process is scraped, a counter never goes back: files only advance, and what one answer has told of a process
  is in its file. An answer is given again for FRESH_S, so this holds for scrapes that are so far apart. If processes
  asked each other at the scrape, one that is busy would be missing from some answers.
- A scrape waits for no other process. One that hangs is in the answer with its last counters.
- A process that dies loses what it has counted since its last snapshot. The parent adds its counters to those of all
  former processes (PAST); a gauge is of the present, and ends with its process.

Readers read the snapshots first and the past afterwards, and leave out the lives that are in the past. The parent
writes the past before it deletes a snapshot. So each life counts exactly once at any moment.
"""

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from trunkline_router.observe.scraping.merged_snapshots import Snapshot, family_snapshot, merged, without_gauges

SNAPSHOT_S = 2.0
SILENT_S = 10.0  # a process that has written nothing for so long hangs: its gauges are no longer of the present
PAST = "past.json"
NAMES = "names"  # see shared_names.py
SUFFIX = ".snapshot"


@dataclass(frozen=True, slots=True)
class SnapshotPlace:
    """Where one process writes.

    life: how often the process with this number was started before
    """

    directory: Path
    number: int
    life: int

    @property
    def file(self) -> Path:
        return self.directory / f"{self.number}.{self.life}{SUFFIX}"

    def write(self, families: Snapshot, now_s: float) -> None:
        """Replaces the process's snapshot. now_s: of a clock that all processes share. Raises OSError."""
        _replace(self.file, {"written_s": now_s, "families": families})
        for name in (PAST, NAMES):  # many systems delete temporary files that have not changed for some days
            with contextlib.suppress(FileNotFoundError):
                os.utime(self.directory / name)


@dataclass(frozen=True, slots=True)
class Past:
    """What former processes have counted, all together.

    lives: by number, how many lives of the process it holds
    """

    lives: dict[str, int]
    families: Snapshot

    @property
    def num_lives(self) -> int:
        return sum(self.lives.values())


def read_all(directory: Path, now_s: float) -> tuple[Sequence[Snapshot], int]:
    """The snapshots of all processes, present and former, and the number of former ones. Raises OSError."""
    present: dict[tuple[str, int], Snapshot] = {}
    for file in sorted(directory.glob(f"*{SUFFIX}")):
        with contextlib.suppress(FileNotFoundError):  # its process has died: it is in the past by now
            told = orjson.loads(file.read_bytes())
            number, life = file.name.removesuffix(SUFFIX).split(".")
            families = told["families"]
            is_silent = now_s - told["written_s"] > SILENT_S
            present[number, int(life)] = without_gauges(families) if is_silent else families
    past = read_past(directory)
    living = [families for (number, life), families in present.items() if life >= past.lives.get(number, 0)]
    return [*living, past.families], past.num_lives


def read_past(directory: Path) -> Past:
    """Raises OSError."""
    try:
        told = orjson.loads((directory / PAST).read_bytes())
    except FileNotFoundError:
        return Past({}, [])
    return Past(told["lives"], told["families"])


def add_to_past(place: SnapshotPlace) -> None:
    """Adds the counters of a process that has ended to the past, and deletes its snapshot. Only the parent may call it.
    Raises OSError."""
    past = read_past(place.directory)
    families: list[Any] = []
    with contextlib.suppress(FileNotFoundError):  # it died before its first snapshot
        families = orjson.loads(place.file.read_bytes())["families"]
    lives = past.lives | {str(place.number): place.life + 1}
    counters = [family_snapshot(family) for family in merged([past.families, without_gauges(families)])]
    _replace(place.directory / PAST, {"lives": lives, "families": counters})
    place.file.unlink(missing_ok=True)
    for part in place.directory.glob(f".{place.file.name}.*"):  # it died while it wrote
        part.unlink(missing_ok=True)


def _replace(file: Path, content: dict[str, Any]) -> None:
    """Readers find the former content or the new one, never a part."""
    fresh = file.with_name(f".{file.name}.{os.getpid()}")
    fresh.write_bytes(orjson.dumps(content))
    fresh.replace(file)
