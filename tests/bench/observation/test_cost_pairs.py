"""The tables of what observation costs."""

from trunkline_bench.observation.cost_pairs import Pair, cells, cost_table
from trunkline_bench.observation.observer import Observations

SCRAPE = """# TYPE trunkline_router_spans counter
trunkline_router_spans_total{outcome="exported"} 120.0
trunkline_router_spans_total{outcome="failed"} 3.0
trunkline_router_processes 1.0
vllm:request_params_n_bucket{model_name="m",engine="0",le="1.0"} 7.0 # {trace_id="0a"} 1.0 1.5
# EOF
"""


def test_a_ratio_is_that_of_a_pair_and_not_of_medians() -> None:
    taken = [Pair(1000.0, 990.0), Pair(2000.0, 1900.0), Pair(500.0, 485.0)]
    assert cells(taken) == ["1,000", "990", "1000.0", "1010.1", "0.970", "0.960 to 0.980", "0.970 ± 0.012"]


def test_one_pair_is_a_range_of_one_ratio() -> None:
    assert cells([Pair(100.0, 98.0)])[-3:] == ["0.980", "0.980 to 0.980", "0.980 ± 0.000"]


def test_each_row_has_a_line() -> None:
    lines = cost_table({"tokens": [Pair(10.0, 9.0)], "requests": [Pair(10.0, 10.0)]}).splitlines()
    assert [line.split("|")[1].strip() for line in lines] == ["per CPU second", "---", "tokens", "requests"]


def test_samples_are_found_by_name_and_labels() -> None:
    seen = Observations(scrape=SCRAPE)
    assert seen.sample("trunkline_router_spans_total", 'outcome="exported"') == 120.0
    assert seen.sample("trunkline_router_processes") == 1.0
    assert seen.sample("vllm:request_params_n_bucket", 'model_name="m",engine="0",le="1.0"') == 7.0
    assert seen.sample("trunkline_router_spans_total", 'outcome="dropped"') == 0.0
