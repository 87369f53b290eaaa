"""The chart's values for rules: another objective, alerts that are switched off, links to runbooks."""

import json
import re
from pathlib import Path
from typing import Any

import helm_python
import pytest
import yaml

from tests.deploy.chart import HOST_PATH, Object, Rendered, Values
from tests.deploy.observability import RULES, alerts, promtool
from tests.router.metrics.records import answered, counts, values
from trunkline_router.observe.metrics.request_metrics import LATENCY_BUCKETS


def rules_of(**given: Any) -> Object:
    """The groups of rules that the chart makes."""
    (rule,) = Rendered({"observability": {"rules": {"enabled": True, **given}}}).of("PrometheusRule")
    spec: Object = rule["spec"]
    return spec


def alerts_of(spec: Object) -> dict[str, Object]:
    return {rule["alert"]: rule for group in spec["groups"] for rule in group["rules"] if "alert" in rule}


def test_without_values_the_rules_are_those_of_the_file_and_link_to_no_place() -> None:
    assert rules_of() == yaml.safe_load(RULES.read_text())
    assert not any("runbook_url" in rule["annotations"] for rule in alerts_of(rules_of()).values())


def test_values_of_a_release_that_did_not_have_them_are_the_defaults() -> None:
    """As after `helm upgrade --reuse-values` from an earlier chart."""
    assert rules_of(firstTokenSeconds=None, firstTokenObjective=None, disabled=None, runbooks=None) == rules_of()
    given = {"rules": {"enabled": True, "firstTokenSeconds": None}, "dashboards": {"enabled": True}}
    made, usual = (
        Rendered({"observability": each}).of("ConfigMap")
        for each in (given, {"rules": {"enabled": True}, "dashboards": {"enabled": True}})
    )
    assert made == usual


# First tokens per minute: within half a second, within a second, and all.
ARRIVALS = {"in time": (20, 97, 100), "late": (20, 20, 100), "rather late": (20, 60, 100)}


def test_another_objective_is_what_the_rules_judge_by(tmp_path: Path) -> None:
    """A second and 95 %: 14.4 times the error budget are 72 % late ones."""
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(rules_of(firstTokenSeconds=1, firstTokenObjective=0.95)))
    promtool("check", "rules", "--lint=all", "--lint-fatal", "rules.yaml", folder=tmp_path)
    name, series = "trunkline_router_first_token_seconds", []
    for model, rates in ARRIVALS.items():
        labels = f'model_name="{model}",lane="standard"'
        names = [f'{name}_bucket{{{labels},le="{bound}"}}' for bound in ("0.5", "1.0")] + [f"{name}_count{{{labels}}}"]
        series += [{"series": each, "values": f"0+{rate}x20"} for each, rate in zip(names, rates, strict=True)]
    firing = 'ALERTS{alertname="TrunklineFirstTokenVerySlow", alertstate="firing"}'
    shares = {f'{{model_name="{model}"}}': 100 - rates[1] for model, rates in ARRIVALS.items()}
    expected = {
        f"max by (model_name) ({firing})": {'{model_name="late"}': 1},
        "round(100 * trunkline:first_tokens_late:ratio_rate5m)": shares,
    }
    asked = [
        {
            "expr": expr,
            "eval_time": "10m",
            "exp_samples": [{"labels": at, "value": value} for at, value in told.items()],
        }
        for expr, told in expected.items()
    ]
    case = {"interval": "1m", "input_series": series, "promql_expr_test": asked}
    document = {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": [case]}
    (tmp_path / "test.yaml").write_text(yaml.safe_dump(document))
    promtool("test", "rules", "test.yaml", folder=tmp_path)


def test_the_objective_is_a_bucket_as_routers_spell_it() -> None:
    counted = counts()
    counted.request_ended(answered())
    spelled = set(values(counted.families, "trunkline_router_first_token_seconds_bucket", "le")) - {("+Inf",)}
    rendered = [json.dumps(rules_of(firstTokenSeconds=seconds)) for seconds in LATENCY_BUCKETS]
    judged = [re.findall(r'le=\\"([^"\\]+)', text) for text in rendered]
    assert {len(bounds) for bounds in judged} == {5}, "five windows"
    assert {tuple(set(bounds)) for bounds in judged} == spelled


@pytest.mark.parametrize(
    "given",
    [
        {"firstTokenSeconds": 0.7},
        {"firstTokenSeconds": "0.5"},
        {"firstTokenObjective": 1},
        {"firstTokenObjective": 0.9},
        {"runbooks": "runbooks.md"},
        {"disabled": "TrunklineTracesLost"},
    ],
    ids=str,
)
def test_values_that_no_rule_could_follow_are_refused(given: Values) -> None:
    with pytest.raises(helm_python.HelmValuesError, match="/observability/rules/"):
        rules_of(**given)


def test_alerts_can_be_switched_off() -> None:
    off = ["TrunklineTracesLost", "TrunklineRequestQuarantined"]
    assert set(alerts()) - set(alerts_of(rules_of(disabled=off))) == set(off)
    in_one_group = [name for name in alerts() if name.startswith("TrunklineFirstToken")]
    names = [group["name"] for group in rules_of(disabled=in_one_group)["groups"]]
    assert "trunkline-first-token" not in names, "a group without rules is left out"
    assert "trunkline-first-token-records" in names


def test_an_alert_that_there_is_not_cannot_be_switched_off() -> None:
    with pytest.raises(helm_python.HelmRenderError) as caught:
        rules_of(disabled=["TrunklineTracesLost", "TraceLost"])
    assert 'observability.rules.disabled: there is no alert "TraceLost"' in str(caught.value)
    assert "\n" not in str(caught.value).strip()


def test_workers_that_may_load_for_an_hour_are_not_late_before() -> None:
    slow = {"slow": HOST_PATH | {"startupSeconds": 3600}, "b": HOST_PATH}
    (rule,) = Rendered({"workers": slow, "observability": {"rules": {"enabled": True}}}).of("PrometheusRule")
    assert alerts_of(rule["spec"])["TrunklineWorkerNotConnected"]["for"] == "3600s"
    assert alerts()["TrunklineWorkerNotConnected"]["for"] == "30m"


def test_dashboards_show_the_objective() -> None:
    given = {"observability": {"rules": {"firstTokenSeconds": 1}, "dashboards": {"enabled": True}}}
    boards = {
        name: json.loads(text)
        for item in Rendered(given).of("ConfigMap")
        if "grafana_dashboard" in item["metadata"]["labels"]
        for name, text in item["data"].items()
    }
    (within,) = [one for one in boards["trunkline-latency.json"]["templating"]["list"] if one["name"] == "within"]
    assert within["current"] == {"text": "1.0", "value": "1.0"}
    assert "1.0" in within["query"].split(",")
    (stat,) = [one for one in boards["trunkline-fleet.json"]["panels"] if one["title"] == "Time to first token, p99"]
    steps = {step["color"]: step["value"] for step in stat["fieldConfig"]["defaults"]["thresholds"]["steps"]}
    assert steps == {"green": None, "orange": 1, "red": 4}
