"""A second router, which tells of the same workers, models and quotas as the first one, multiplies nothing."""

import json
import re
from collections.abc import Iterator

import pytest

from tests.cluster.prometheus import Prometheus, running
from tests.deploy.observability import DASHBOARDS, dashboard_queries, rules
from tests.deploy.two_routers import ONE_UNIX_S, TWO_UNIX_S, write_blocks

NUM_PROCESSES = "sum (trunkline_router_processes)"  # of all routers

Answer = dict[tuple[tuple[str, str], ...], float]


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    folder = tmp_path_factory.mktemp("two-routers")
    data = write_blocks(folder)
    (folder / "prometheus.yaml").write_text("{}")
    with running(folder / "prometheus.yaml", data, "--storage.tsdb.retention.time=100y") as found:
        yield found


def answers(prometheus: Prometheus, expr: str) -> tuple[Answer, Answer]:
    """With one router, and with two."""
    expr = expr.replace("$__rate_interval", "10m").replace("$__range", "30m")
    expr = re.sub(r"\$\w+", ".*", expr)
    expr = re.sub(r"\[(6h|3d)\]", "[1h]", expr)  # there is an hour of either
    one, two = (
        {tuple(sorted(labels.items())): value for labels, value in prometheus.samples(expr, at)}
        for at in (ONE_UNIX_S, TWO_UNIX_S)
    )
    return one, two


def test_all_panels_show_the_same_with_a_second_router(prometheus: Prometheus) -> None:
    different, empty = {}, []
    for asked in dashboard_queries():
        one, two = answers(prometheus, asked.expr)
        if asked.expr == NUM_PROCESSES:
            assert list(two.values()) == [2 * value for value in one.values()]
            continue
        if not one and "vector(0)" not in asked.expr:
            empty.append(asked.place)
        if not any("instance" in dict(labels) for labels in one) and two != pytest.approx(one):
            different[asked.place] = (asked.expr, one, two)
    assert different == {}
    assert empty == []


def test_all_rules_see_the_same_with_a_second_router(prometheus: Prometheus) -> None:
    for rule in rules():
        one, two = answers(prometheus, rule["expr"])
        if not any("instance" in dict(labels) for labels in one):
            assert two == pytest.approx(one), rule


def test_a_query_that_counts_a_worker_for_each_router_would_be_found(prometheus: Prometheus) -> None:
    one, two = answers(prometheus, "sum by (state) (trunkline_router_worker_state)")
    assert {labels: 2 * value for labels, value in one.items()} == two


def test_a_worker_counts_once_and_in_each_state_that_a_router_sees_it_in(prometheus: Prometheus) -> None:
    (asked,) = [one for one in dashboard_queries() if one.place.startswith("fleet: Workers, by state")]
    for answer in answers(prometheus, asked.expr):
        assert answer[(("state", "connecting"),)] == 2, "both workers"


def test_tenants_of_direct_requests_can_be_chosen(prometheus: Prometheus) -> None:
    variables = json.loads(next(file for file in DASHBOARDS if file.stem == "tenants").read_text())["templating"][
        "list"
    ]
    (tenant,) = [one for one in variables if one["name"] == "tenant"]
    assert prometheus.label_values(tenant["definition"]) == ["acme", "direct", "refused"]


def test_panels_of_conventions_follow_the_choice_of_a_model(prometheus: Prometheus) -> None:
    asked = [one for one in dashboard_queries() if "gen_ai_server" in one.expr]
    assert len(asked) == 12
    for one in asked:
        assert answers(prometheus, one.expr.replace("$model", "small"))[0]
        assert not answers(prometheus, one.expr.replace("$model", "neither"))[0]
