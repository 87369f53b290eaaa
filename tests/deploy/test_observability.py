"""Dashboards, rules and the collector's configuration are valid, and each alert is tested and has a runbook."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.lint import observability
from tests.deploy.observability import (
    DASHBOARDS,
    FOREIGN,
    OBSERVABILITY,
    REPOSITORY,
    RULES,
    Asked,
    alerts,
    dashboard_queries,
    family,
    foreign_names,
    metrics_in,
    panels,
    promtool,
    rules,
)
from tests.metrics_page import Row, documented, rows
from trunkline_cli import launcher, main
from trunkline_cli.plan import ClusterPlan
from trunkline_router.observe.tracing.request_traces import RESUMED, SLOW
from trunkline_router.record.request_record import FAILED

RUNBOOKS = REPOSITORY / "docs" / "runbooks.md"
RULE_TESTS = OBSERVABILITY / "rules_test.yaml"
# By the README of the collector's tail sampling processor (open-telemetry/opentelemetry-collector-contrib).
POLICIES = {
    *("always_sample", "latency", "numeric_attribute", "probabilistic", "status_code", "string_attribute"),
    *("trace_state", "trace_flags", "rate_limiting", "bytes_limiting", "span_count", "boolean_attribute"),
    *("ottl_condition", "and", "drop", "composite"),
}
UNITS_OF_FORMS = {"humanizePercentage", "humanizeDuration"}  # they write the unit themselves
COUNTED = {"times", "choices", "spans"}
UNITS = {"short", "none", "s", "bytes", "percentunit", "reqps", "watt", "celsius"}
COLUMNS = 24


def test_prometheus_takes_the_rules_and_the_configuration() -> None:
    assert f"{len(rules())} rules found" in promtool("check", "rules", "--lint=all", "--lint-fatal", RULES.name)
    promtool("check", "config", "prometheus.yaml")


def test_the_configuration_scrapes_what_make_serve_runs_by_the_names_that_routers_tell(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = plan_of_make_serve(monkeypatch)
    router, worker = yaml.safe_load((OBSERVABILITY / "prometheus.yaml").read_text())["scrape_configs"]
    assert router["static_configs"] == [{"targets": [f"127.0.0.1:{plan.http_port}"]}]
    flags = [dict(word.split("=", 1) for word in plan.worker_command(index)[1:]) for index in range(plan.workers)]
    assert worker["static_configs"] == [
        {"targets": [f"127.0.0.1:{flag['--metrics-port']}"], "labels": {"worker": flag["--worker-id"]}}
        for flag in flags
    ]


def plan_of_make_serve(monkeypatch: pytest.MonkeyPatch) -> ClusterPlan:
    """What the Makefile's command would start."""
    plans: list[ClusterPlan] = []
    for name in ("MAKEFLAGS", "MAKELEVEL", "TRUNKLINE_HTTP_PORT", "TRUNKLINE_METRICS_PORT"):
        monkeypatch.delenv(name, raising=False)
    make = ["make", "--dry-run", "--old-file=.venv/.installed-serve", "VENV=.venv", "serve"]
    printed = subprocess.run(make, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    _, _, *arguments = shlex.split(printed)

    def serve(plan: ClusterPlan, **_: object) -> int:
        plans.append(plan)
        return 0

    monkeypatch.setattr(launcher, "serve", serve)
    monkeypatch.setattr(sys, "argv", ["trunkline", *arguments])
    monkeypatch.chdir(REPOSITORY)
    with pytest.raises(SystemExit):
        main.main()
    return plans[0]


def test_alerts_fire_when_they_should_and_only_then() -> None:
    assert "SUCCESS" in promtool("test", "rules", RULE_TESTS.name)


def test_for_each_alert_it_is_tested_that_it_fires_and_that_it_does_not() -> None:
    fires: set[str] = set()
    is_quiet: set[str] = set()
    for case in yaml.safe_load(RULE_TESTS.read_text())["tests"]:
        for asked in case["promql_expr_test"]:
            if found := re.search(r'alertname="(\w+)"', asked["expr"]):
                (fires if asked["exp_samples"] else is_quiet).add(found[1])
    assert fires == is_quiet == set(alerts())


def test_each_alert_has_a_runbook_and_each_runbook_an_alert() -> None:
    headings = re.findall(r"^## (.+)$", RUNBOOKS.read_text(), re.MULTILINE)
    sections = dict(
        zip(map(anchor, headings), re.split(r"^## .+$", RUNBOOKS.read_text(), flags=re.MULTILINE)[1:], strict=True)
    )
    linked = set()
    for name, rule in alerts().items():
        assert rule["labels"]["severity"] in ("page", "ticket"), name
        assert set(rule["annotations"]) == {"summary", "description", "runbook"}, name
        page, _, section = rule["annotations"]["runbook"].partition("#")
        assert REPOSITORY / page == RUNBOOKS, name
        assert name in sections[section], f"{name} is not named in its runbook"
        linked.add(section)
    assert linked == set(sections)
    for section, text in sections.items():
        is_told = "**Do**" in text or "| do |" in text or text.count("\n- ") > 1
        assert is_told, f"{section} does not say what to do"
    for target in re.findall(r"\]\(#([a-z0-9-]+)\)", RUNBOOKS.read_text()):
        assert target in sections


@pytest.mark.parametrize("rule", alerts().values(), ids=alerts())
def test_what_an_alert_says_is_a_sentence_in_which_each_number_has_its_unit(rule: dict[str, Any]) -> None:
    summary, description = rule["annotations"]["summary"], rule["annotations"]["description"]
    assert description[0].isupper() or description.startswith("hung:")
    assert description.endswith(".")
    said = re.sub(r"{{.*?}}", "", summary)
    assert re.match(r"[A-Z]", said.lstrip("' ")) or summary.startswith("{{"), summary
    numbers = re.findall(r"{{ \$value \| (.*?) }}( \w+)?", summary)
    assert len(numbers) == len(re.findall(r"{{ \$value", summary))
    for form, word in numbers:
        assert form in UNITS_OF_FORMS or (form.startswith("printf") and word.strip() in COUNTED), summary


def anchor(heading: str) -> str:
    """The anchor of a heading on a page of Markdown."""
    return re.sub(r"[^a-z0-9 -]", "", heading.lower()).replace(" ", "-")


def test_panels_that_the_runbooks_name_are_on_a_dashboard() -> None:
    named = set(re.findall(r'"([A-Z][^"]+)"', re.sub(r"```.*?```", "", RUNBOOKS.read_text(), flags=re.DOTALL)))
    known = set()
    for file in DASHBOARDS:
        dashboard = json.loads(file.read_text())
        known |= {dashboard["title"].removeprefix("Trunkline / ")} | {one["title"] for one in dashboard["panels"]}
    assert {one for one in named if not any(title.startswith(one) for title in known)} == set()


@pytest.mark.parametrize("file", DASHBOARDS, ids=lambda file: file.stem)
def test_every_panel_says_what_it_shows_and_in_which_unit(file: Path) -> None:
    dashboard = json.loads(file.read_text())
    variables = {variable["name"] for variable in dashboard["templating"]["list"]}
    assert {"datasource", "model"} <= variables
    assert dashboard["uid"] == f"trunkline-{file.stem}"
    for panel in panels(file):
        title = panel["title"]
        assert len(panel["description"]) > 10, title
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS, title
        assert panel["targets"], title
        for target in panel["targets"]:
            used = set(re.findall(r"\$(?!__)(\w+)", target["expr"]))
            assert used <= variables, title
            if panel["type"] == "timeseries":
                assert target["legendFormat"] != "__auto", title
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


@pytest.mark.parametrize("file", DASHBOARDS, ids=lambda file: file.stem)
def test_panels_fill_the_grid_without_overlap(file: Path) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in json.loads(file.read_text())["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert at["x"] + at["w"] <= COLUMNS
        assert not cells & taken, panel["title"]
        taken |= cells


def test_dashboards_and_the_charts_copies_are_as_they_are_generated() -> None:
    for file, text in observability.files().items():
        assert file.read_text() == text, f"{file.name}: run make observability"


def test_single_requests_are_linked_to_their_traces() -> None:
    sources = yaml.safe_load((OBSERVABILITY / "grafana" / "datasources.yaml").read_text())["datasources"]
    uids = {source["uid"]: source for source in sources}
    (link,) = uids["prometheus"]["jsonData"]["exemplarTraceIdDestinations"]
    assert link["name"] == "trace_id"
    assert uids[link["datasourceUid"]]["type"] == "tempo"
    with_dots = [
        target for file in DASHBOARDS for panel in panels(file) for target in panel["targets"] if "exemplar" in target
    ]
    assert len(with_dots) > 10
    assert all("_bucket" in target["expr"] for target in with_dots)


def test_the_collector_is_configured_as_it_is_documented() -> None:
    config: dict[str, Any] = yaml.safe_load((OBSERVABILITY / "otel-collector.yaml").read_text())
    for pipeline in config["service"]["pipelines"].values():
        for kind in ("receivers", "processors", "exporters"):
            assert set(pipeline[kind]) <= set(config[kind])
        assert pipeline["processors"][0] == "memory_limiter"
    assert set(config["service"]["extensions"]) <= set(config["extensions"])
    policies = config["processors"]["tail_sampling"]["policies"]
    names = {"slow-first-token", "failed", "refused", "kept-by-router", "resumed", "some"}
    assert {policy["name"] for policy in policies} == names
    for policy in policies:
        assert policy["type"] in POLICIES
        assert set(policy) == {"name", "type", policy["type"]}


def test_attributes_that_the_collector_reads_are_those_that_routers_write() -> None:
    text = (OBSERVABILITY / "otel-collector.yaml").read_text()
    written = "\n".join(
        file.read_text()
        for folder in ("router/trunkline_router/observe/tracing", "protos/trunkline_runtime/telemetry")
        for file in (REPOSITORY / folder).glob("*.py")
    )
    ours = set(re.findall(r"trunkline\.(\w+)[,\"}]", text))
    assert ours == {"kept", "outcome", "resumptions"}
    reasons = set(re.findall(r'ContainsValue\(attributes\["trunkline.kept"\], "(\w+)"\)', text))
    assert reasons == {SLOW, FAILED, RESUMED}, "all but those that were merely sampled"
    assert all(f'"{name}"' in written or f'"trunkline.{name}"' in written for name in ours)
    for name in re.findall(r'"(gen_ai\.[\w.]+)"', text):
        assert f'"{name}"' in written


def test_names_of_other_dashboards_have_sources_and_reasons() -> None:
    for board in FOREIGN["dashboards"]:
        assert re.fullmatch(r"[\w.-]+/[\w.-]+", board["repository"])
        assert re.fullmatch(r"[0-9a-f]{40}", board["commit"])
        assert board["path"].endswith(".json")
        assert board["metrics"] == sorted(set(board["metrics"]))
    served, absent = foreign_names()
    assert absent <= {name for board in FOREIGN["dashboards"] for name in board["metrics"]}
    assert len(served) > 25


def test_each_name_in_a_query_is_found() -> None:
    assert metrics_in('sum by (le) (rate(vllm:time_to_first_token_seconds_bucket{job=~"trunkline_x"}[5m]))') == {
        "vllm:time_to_first_token_seconds"
    }
    assert all(metrics_in(asked.expr) for asked in dashboard_queries())


def served() -> set[str]:
    """All metrics of routers and workers, as their page lists them."""
    return {*documented("router"), *documented("worker"), "up"}


def test_panels_of_a_metric_with_models_follow_the_choice_of_a_model_a_worker_or_a_tenant() -> None:
    of_models = {"model_name", "gen_ai_request_model"}
    with_model = {family(row.name) for row in documented_rows() if of_models & set(row.labels)}
    for asked in dashboard_queries():
        if metrics_in(asked.expr) & with_model:
            assert re.search(r'="?~"\$(model|worker|tenant)"', asked.expr), asked.place


def test_queries_ask_for_metrics_that_are_served() -> None:
    """tests/cluster/test_prometheus.py runs them."""
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    for asked in [*dashboard_queries(), *(Asked(str(rule), rule["expr"]) for rule in rules())]:
        assert metrics_in(asked.expr) <= served() | recorded, asked.place


def test_metrics_that_dashboards_of_others_know_are_served_or_there_is_a_reason() -> None:
    known, absent = foreign_names()
    assert known <= served()
    assert not absent & served(), "these are served now: take them off the list"


def test_labels_of_queries_are_those_of_the_metrics() -> None:
    documented = {label for row in documented_rows() for label in row.labels}
    labels = documented | {"le", "job", "instance", "worker"}  # the last three are of the scrape
    for asked in [*dashboard_queries(), *(Asked(str(rule), rule["expr"]) for rule in rules())]:
        for names in re.findall(r"\b(?:by|on) \(([^)]*)\)", asked.expr):
            assert {name.strip() for name in names.split(",") if name.strip()} <= labels, asked.place
        assert set(re.findall(r"[{,] ?(\w+)(?:=~|!=|=)\"", asked.expr)) <= labels, asked.place


def documented_rows() -> list[Row]:
    """All metrics on the page."""
    return rows("router") + rows("worker")
