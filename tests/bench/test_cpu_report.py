"""`make bench-cpu`: the bandwidth of memory beside runs of one request."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from trunkline_bench.engine import measured_run
from trunkline_bench.engine.cpu_model import Alone, table, weight_bytes_read
from trunkline_bench.engine.measured_run import RUNNERS, Job, Ran, measured
from trunkline_bench.engine.workload import BenchRequest
from trunkline_bench.servers.demo_model import DEMO_MODEL

REQUEST = BenchRequest([3, 4, 5, 6], 5)


def job(runner: str, *, reads_memory: bool) -> Job:
    return Job(runner, str(DEMO_MODEL), "float32", 1, 1, [REQUEST], reads_memory=reads_memory)


def test_memory_is_read_right_before_and_right_after_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    rates = iter((10e9, 30e9))

    def read() -> float:
        events.append("read")
        return next(rates)

    def noting(job: Job) -> Callable[[], Ran]:
        def run() -> Ran:
            events.append(f"run of {job.requests[0].output_tokens}")
            return Ran(0)

        return run

    monkeypatch.setattr(measured_run, "memory_bandwidth", read)
    monkeypatch.setitem(RUNNERS, "noting", noting)
    assert measured(job("noting", reads_memory=True)).bandwidth == 20e9
    assert events == ["run of 4", "read", "run of 5", "read"], "the first run warms up"


def test_an_engine_tells_the_bandwidth_if_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured_run, "READ_BYTES", 1 << 22)
    asked, not_asked = (measured(job("engine", reads_memory=reads)) for reads in (True, False))
    assert asked.bandwidth is not None
    assert 1e8 < asked.bandwidth < 1e13
    assert not_asked.bandwidth is None
    assert asked.output_tokens == not_asked.output_tokens == 5
    assert json.loads(json.dumps(asdict(asked)))["bandwidth"] == asked.bandwidth


def test_a_row_has_the_bandwidth_of_its_own_runs() -> None:
    kinds, counts = ("int8", "int4"), (1, 16, 64)
    times = {("ours", kind, count): [100.0] for kind in kinds for count in counts}
    read = {kind: weight_bytes_read(Path(DEMO_MODEL), kind) for kind in kinds}
    alone = {
        # Half of what memory could have read each time, though steps and bandwidth differ.
        "int8": [Alone(read["int8"] / 10e9, 20e9), Alone(read["int8"] / 15e9, 30e9), Alone(read["int8"] / 20e9, 40e9)],
        "int4": [Alone(read["int4"] / 30e9, 40e9)],
    }
    rows = [line.split(" | ") for line in table(times, alone, ["ours"], Path(DEMO_MODEL)).splitlines()]
    found = {(row[0].strip("| "), row[1]): [cell.strip(" |") for cell in row[-2:]] for row in rows[2:]}
    assert found["int8", "1"] == ["30.0", "50%"]
    assert found["int4", "1"] == ["40.0", "75%"]
    assert found["int8", "16"] == found["int4", "64"] == ["-", "-"]
