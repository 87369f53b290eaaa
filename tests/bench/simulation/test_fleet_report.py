"""The report of a sweep: goals, and comparisons with our policy."""

import json
from pathlib import Path
from typing import Any

import pytest

from trunkline_bench.simulation.fleet import goals, sweep
from trunkline_bench.simulation.fleet.sweep import Point
from trunkline_bench.simulation.fleet.workloads import BASE, BESIDE, OURS

FIGURES = {
    "requests": 100, "requests_per_s": 10.0, "hit_rate": 0.9, "ideal_hit_rate": 0.93, "fitting_hit_rate": 0.93,
    "predicted_hit_rate": 0.9, "ttft_s": [0.1, 0.2, 0.4], "delay_p99_s": 0.2, "itl_s": [0.01, 0.1],
    "output_tokens_per_s": 100.0, "busy_share": 1.0, "busy_cv": 0.01, "prefill_cv": 0.02, "refused": 0,
    "preemptions": 0, "given_up": False, "copies": 5.0, "meets_goal": True, "took_s": 60.0,
}  # fmt: skip


def write_report(runs: Path, output: Path, head: str) -> None:
    from trunkline_bench.simulation.fleet import sweep_report  # matplotlib, which takes a second

    sweep_report.write(runs, output, head)


def run(policy: str, load: float, workload: str = "agent", **figures: Any) -> goals.Run:
    point = {"workload": workload, "workers": 8, "policy": policy, "load": load, "duration_s": 600.0}
    return point | {"is_search": False, "routers": 1, "credit_sync_ms": 20.0, "seed": 0} | FIGURES | figures


def told(runs: list[goals.Run], goal: str) -> list[str]:
    """[measured, verdict] of the row whose goal begins with this text."""
    (found,) = [cells for name, cells in goals.rows(runs).items() if name.startswith(goal)]
    return found


def keep(folder: Path, runs: list[goals.Run]) -> Path:
    folder.mkdir()
    for number, one in enumerate(runs):
        (folder / f"{number}.json").write_text(json.dumps(one))
    return folder


def test_hits_are_held_against_what_fits_where_the_ideal_does_not_fit() -> None:
    short: dict[str, Any] = {"hit_rate": 0.19, "ideal_hit_rate": 0.4, "fitting_hit_rate": 0.2}
    assert told([run(OURS, load, **short) for load in (0.5, 0.8, 1.0)], "hits")[1] == "holds"
    measured, verdict = told([run(OURS, 0.8, **short | {"hit_rate": 0.18})], "hits")
    assert measured == "80%: 45.0% of the ideal, 90.0% of what fits"
    assert verdict == "**misses** at 80%; open at 50%, 100%"


@pytest.mark.parametrize(
    ("ours_misses", "base_meets", "base_misses", "verdict"),
    [
        (1.05, 0.30, 0.32, "holds"),
        (1.05, 0.37, 0.38, "**misses**"),
        (1.05, 0.32, 0.36, "open"),
        (None, 0.37, 0.38, "open"),
        (None, None, 0.30, "holds"),
        (1.05, 0.37, None, "**misses**"),
    ],
)
def test_a_quotient_of_highest_loads_holds_by_its_lower_bound_and_misses_by_its_upper(
    ours_misses: float | None, base_meets: float | None, base_misses: float | None, verdict: str
) -> None:
    tried = [(OURS, 1.0, True), (OURS, ours_misses, False), (BASE, base_meets, True), (BASE, base_misses, False)]
    runs = [run(policy, load, meets_goal=met, is_search=True) for policy, load, met in tried if load is not None]
    assert told(runs, "load at TTFT")[1] == verdict


def test_a_policy_that_beats_ours_at_one_load_is_a_miss_there() -> None:
    runs = [run(policy, load) for policy in (OURS, *BESIDE) for load in (0.5, 0.8)]
    runs += [run(OURS, 1.0), run("least-load", 0.5, ttft_s=[0.1, 0.2, 0.3])]
    measured, verdict = told(runs, "best other's TTFT p99")
    assert measured == "50%: 0.750 (least-load, of 4); 80%: 1.000 (round-robin, of 3)"
    assert verdict == "**misses** at 50%; open at 100%"


def test_the_comparison_with_other_policies_is_open_until_all_required_ones_were_run() -> None:
    runs = [run(OURS, 0.8), *(run(policy, 0.8, ttft_s=[0.2, 0.4, 0.8]) for policy in BESIDE[:2])]
    measured, verdict = told(runs, "best other's TTFT p99")
    assert measured == "80%: 2.00 (round-robin, of 2; without sglang-cache-aware)"
    assert verdict == "open at 50%, 80%, 100%"
    runs.append(run(BESIDE[2], 0.8, ttft_s=[0.2, 0.4, 0.9]))
    assert told(runs, "best other's TTFT p99")[1] == "holds; open at 50%, 100%"
    runs[-1] = run(BESIDE[2], 0.8, ttft_s=[0.05, 0.4, 0.3])
    assert told([runs[0], runs[-1]], "best other's TTFT p99")[1] == "**misses** at 80%; open at 50%, 100%"


def test_a_run_that_was_given_up_counts_and_missed_the_goal() -> None:
    runs = [run(policy, 0.8) for policy in (OURS, *BESIDE[:2])]
    # Over requests with a first token; the run did not wait for the others.
    runs.append(run(BESIDE[2], 0.8, given_up=True, is_search=True, meets_goal=False, ttft_s=[0.2, 0.2, 0.3]))
    measured, verdict = told(runs, "best other's TTFT p99")
    assert measured == "80%: 1.000 (round-robin, of 3)"
    assert verdict == "holds; open at 50%, 100%"
    assert told([runs[0], runs[-1]], "best other's TTFT p99")[0].startswith("80%: 5.00 (sglang-cache-aware, of 1")


def test_a_policy_whose_median_is_lower_is_a_miss_at_the_median() -> None:
    runs = [run(policy, load) for policy in (OURS, *BESIDE) for load in (0.5, 0.8, 1.0)]
    assert told(runs, "best other's TTFT p50")[1] == "holds"
    runs.append(run("least-load", 0.8, ttft_s=[0.0997, 0.5, 3.0]))
    measured, verdict = told(runs, "best other's TTFT p50")
    assert "80%: 0.997 (least-load, of 4)" in measured
    assert verdict == "**misses** at 80%"
    assert told(runs, "best other's TTFT p99")[1] == "holds"


def test_other_seeds_are_in_the_table_but_decide_no_goal(tmp_path: Path) -> None:
    runs = [run(OURS, 0.5), run(OURS, 0.5, seed=1, hit_rate=0.1, ttft_s=[9.0, 9.0, 9.0])]
    assert told(runs, "hits") == told(runs[:1], "hits")
    write_report(keep(tmp_path / "runs", runs), tmp_path / "out", "- date: then")
    rows = [line.split(" | ")[0] for line in (tmp_path / "out" / "fleet.md").read_text().splitlines()]
    assert rows.count("| predicted-ttft, seed 1") == 1


def test_mooncake_is_judged_by_delay() -> None:
    runs = [run(OURS, 0.8, "mooncake"), run(BASE, 0.8, "mooncake", ttft_s=[0.1, 0.2, 0.3], delay_p99_s=0.6)]
    assert told(runs, "best other's delay p99")[0].startswith("80%: 3.00 (round-robin, of 1")


def test_a_delay_that_is_not_positive_is_not_compared() -> None:
    runs = [run(OURS, 0.8, "mooncake", delay_p99_s=-0.01), run(BASE, 0.8, "mooncake")]
    assert told(runs, "best other's delay p99")[0] == "-"


def test_uneven_work_is_a_miss_from_eighty_percent_load_on() -> None:
    runs = [run(OURS, 0.5, busy_cv=0.3), run(OURS, 0.8), run(OURS, 1.0, busy_cv=0.2)]
    assert told(runs, "CV") == ["80%: 0.010; 100%: 0.200", "**misses** at 100%"]


def test_the_table_of_a_load_compares_each_policy_with_ours(tmp_path: Path) -> None:
    runs = [run(BASE, 0.5, ttft_s=[0.2, 2.0, 10.0]), run(OURS, 0.5)]
    write_report(keep(tmp_path / "runs", runs), tmp_path / "out", "- date: then")
    lines = (tmp_path / "out" / "fleet.md").read_text().splitlines()
    head = next(number for number, line in enumerate(lines) if line.startswith("| 50%, 10 requests/s"))
    names = lines[head].split(" | ")
    ours, base = (dict(zip(names, line.split(" | "), strict=True)) for line in lines[head + 2 : head + 4])
    assert (ours["TTFT p50 / ours"], ours["TTFT p99 / ours"]) == ("1.00", "1.00")
    assert (base["TTFT p50 / ours"], base["TTFT p99 / ours"]) == ("2.00", "25")
    assert (ours["of the ideal"], ours["of what fits"]) == ("96.8%", "96.8%")


def test_the_report_can_be_rewritten_from_its_own_files_with_the_same_head(tmp_path: Path) -> None:
    runs = keep(tmp_path / "runs", [run(OURS, 0.5), run(BASE, 0.5)])
    (runs / "capacity-agent.json").write_text('{"copies_per_worker": 2.0, "requests_per_s": 3.0}\n')
    output = tmp_path / "out"
    write_report(runs, output, "- date: then\n- command: `this\n  and that`\n- code: commit 1234567")
    written = {path.name: path.read_text() for path in output.iterdir()}
    assert "100 % is 3 requests/s" in written["fleet.md"]
    assert sweep.main(["--report-only", "--runs", str(output), "--output", str(output)]) == 0
    assert {path.name: path.read_text() for path in output.iterdir()} == written


def test_a_report_without_runs_is_an_error_of_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sweep.main(["--report-only", "--runs", str(tmp_path), "--output", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"bench-fleet: {tmp_path}: there are no figures of runs\n"


def test_the_point_of_a_run_is_what_goals_read() -> None:
    assert set(run(OURS, 0.5)) - set(FIGURES) == set(Point.__slots__)
