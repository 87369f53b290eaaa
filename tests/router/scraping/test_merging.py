"""One answer of the metrics of several processes, some of which have died."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from prometheus_client.core import Metric
from prometheus_client.samples import Exemplar

from trunkline_router.observe.scraping.merged_snapshots import family_snapshot, merged
from trunkline_router.observe.scraping.shared_names import SharedNames
from trunkline_router.observe.scraping.snapshot_files import NAMES, PAST, SILENT_S, SnapshotPlace, add_to_past, read_all
from trunkline_runtime.telemetry.bounded_names import OTHER
from trunkline_runtime.telemetry.bucket_counts import BucketCounts
from trunkline_runtime.telemetry.exposition import counter, gauge, histogram

NOW_S = 1000.0


def served(count: float) -> Metric:
    return counter("served", "Served.", ("lane",), [(("batch",), count)])


def values(families: list[Metric]) -> dict[str, float]:
    """By name and labels."""
    return {
        ",".join((sample.name, *sample.labels.values())): sample.value
        for family in families
        for sample in family.samples
    }


def answer(directory: Path, now_s: float = NOW_S) -> dict[str, float]:
    """What a scraper would be told."""
    return values(list(merged(read_all(directory, now_s)[0])))


def test_counters_and_histograms_add_up_and_each_gauge_has_its_rule() -> None:
    snapshots = []
    for n in (1, 2):
        counts = BucketCounts((0.1, 1.0))
        counts.add(0.05, n)
        counts.add_traced(5.0, n, NOW_S + n)
        families = [
            served(n),
            histogram("latency", "Latency.", (), [((), counts)]),
            gauge("trunkline_router_open_requests", "Summed.", (), [((), float(n))]),
            gauge("trunkline_router_event_loop_lag_seconds", "Highest.", (), [((), float(n))]),
            gauge("trunkline_router_worker_index_accuracy", "Lowest.", ("worker",), [((f"w{n}",), 0.5), (("w",), n)]),
        ]
        snapshots.append([family_snapshot(family) for family in families])
    found = list(merged(snapshots))
    assert values(found) == {
        "served_total,batch": 3.0,
        "latency_bucket,0.1": 3.0,
        "latency_bucket,1.0": 3.0,
        "latency_bucket,+Inf": 5.0,
        "latency_count": 5.0,
        "latency_sum": pytest.approx(10.15),
        "trunkline_router_open_requests": 3.0,
        "trunkline_router_event_loop_lag_seconds": 2.0,
        "trunkline_router_worker_index_accuracy,w1": 0.5,
        "trunkline_router_worker_index_accuracy,w2": 0.5,
        "trunkline_router_worker_index_accuracy,w": 1.0,
    }
    latest = next(sample.exemplar for sample in found[1].samples if sample.exemplar is not None)
    assert latest == Exemplar({"trace_id": f"{2:032x}"}, 5.0, NOW_S + 2)


def test_a_process_that_died_keeps_its_counters_and_loses_its_gauges(tmp_path: Path) -> None:
    def write(place: SnapshotPlace, count: float) -> None:
        running = gauge("trunkline_router_running_requests", "Running.", (), [((), 1.0)])
        place.write([family_snapshot(served(count)), family_snapshot(running)], NOW_S)

    first, second = SnapshotPlace(tmp_path, 0, 0), SnapshotPlace(tmp_path, 1, 0)
    write(first, 5)
    write(second, 7)
    assert answer(tmp_path) == {"served_total,batch": 12.0, "trunkline_router_running_requests": 2.0}
    half_written = tmp_path / f".{second.file.name}.4711"
    half_written.touch()
    add_to_past(second)
    assert not half_written.exists()
    assert answer(tmp_path) == {"served_total,batch": 12.0, "trunkline_router_running_requests": 1.0}
    write(SnapshotPlace(tmp_path, 1, 1), 1)
    assert answer(tmp_path) == {"served_total,batch": 13.0, "trunkline_router_running_requests": 2.0}
    add_to_past(SnapshotPlace(tmp_path, 1, 1))
    add_to_past(SnapshotPlace(tmp_path, 1, 2))  # it died before its first snapshot
    snapshots, num_lives = read_all(tmp_path, NOW_S)
    assert values(list(merged(snapshots)))["served_total,batch"] == 13.0
    assert num_lives == 3
    assert sorted(os.listdir(tmp_path)) == ["0.0.snapshot", PAST]


def test_a_life_that_is_both_in_the_past_and_in_its_file_counts_once(tmp_path: Path) -> None:
    """The parent writes the past before it deletes the file: a reader may see both."""
    place = SnapshotPlace(tmp_path, 0, 0)
    place.write([family_snapshot(served(5))], NOW_S)
    left_over = place.file.read_bytes()
    add_to_past(place)
    place.file.write_bytes(left_over)
    assert answer(tmp_path) == {"served_total,batch": 5.0}


def test_a_process_that_hangs_keeps_its_counters_alone(tmp_path: Path) -> None:
    waiting = gauge("trunkline_router_waiting_requests", "Waiting.", (), [((), 1.0)])
    SnapshotPlace(tmp_path, 0, 0).write([family_snapshot(served(5)), family_snapshot(waiting)], NOW_S)
    assert answer(tmp_path, NOW_S + SILENT_S)["trunkline_router_waiting_requests"] == 1.0
    assert answer(tmp_path, NOW_S + SILENT_S + 1) == {"served_total,batch": 5.0}


def test_files_that_seldom_change_do_not_look_forgotten(tmp_path: Path) -> None:
    place = SnapshotPlace(tmp_path, 0, 1)
    add_to_past(SnapshotPlace(tmp_path, 0, 0))
    SharedNames(tmp_path / NAMES, 4).label("a")
    for name in (PAST, NAMES):
        os.utime(tmp_path / name, (0.0, 0.0))
    place.write([], NOW_S)
    assert all((tmp_path / name).stat().st_mtime > 0 for name in (PAST, NAMES))


def test_processes_agree_on_the_names_that_have_labels(tmp_path: Path) -> None:
    one, two = (SharedNames(tmp_path / "names", 4, ["listed"]) for _ in range(2))
    assert [one.label(name) for name in ("a", "", "listed")] == ["a", "", "listed"]
    assert [two.label(name) for name in ("b", "c", "a", "")] == ["b", OTHER, "a", ""]
    assert [one.label(name) for name in ("b", "c", "d")] == ["b", OTHER, OTHER]
    assert [two.label(name) for name in ("d", "b", "listed")] == [OTHER, "b", "listed"]


def test_names_do_not_depend_on_the_locale(tmp_path: Path) -> None:
    names = ["größe", "会社"]
    script = (
        "import sys; from pathlib import Path; from trunkline_router.observe.scraping.shared_names import SharedNames; "
        "shared = SharedNames(Path(sys.argv[1]), 4); "
        f"assert [shared.label(name) for name in {names!a}] == {names!a}"
    )
    environment = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "names")], env=environment, check=True)
    assert SharedNames(tmp_path / "names", 4).label("größe") == "größe"


def test_names_that_cannot_be_written_count_with_the_others(tmp_path: Path) -> None:
    names = SharedNames(tmp_path / "absent" / "names", 4)
    assert names.label("a") == OTHER


def test_ten_thousand_new_names_take_little_time(tmp_path: Path) -> None:
    names = SharedNames(tmp_path / "names", 100)
    begun_s = time.process_time()
    for n in range(10_000):
        names.label(f"tenant-{n}")
    assert time.process_time() - begun_s < 1.0, "seconds; the file is read only until it is full"
