"""Dashboards, rules and other people's metric names, as tests read them."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

REPOSITORY = Path(__file__).parents[2]
OBSERVABILITY = REPOSITORY / "deploy" / "observability"
RULES = OBSERVABILITY / "rules.yaml"
FOREIGN: dict[str, Any] = json.loads((Path(__file__).parent / "foreign_metrics.json").read_text())
DASHBOARDS = sorted((OBSERVABILITY / "dashboards").glob("*.json"))

_METRIC = re.compile(r"\b(?:vllm:|trunkline_|trunkline:|gen_ai_|process_|http_)\w[\w:]*|\bup\b")
_SELECTORS = re.compile(r"{[^}]*}")
_STRINGS = re.compile(r'"[^"]*"')


class Asked(NamedTuple):
    """A query, and where it stands."""

    place: str
    expr: str


def panels(file: Path) -> list[dict[str, Any]]:
    """The panels of a dashboard, without rows."""
    found: list[dict[str, Any]] = [one for one in json.loads(file.read_text())["panels"] if one["type"] != "row"]
    return found


def dashboard_queries() -> Iterator[Asked]:
    """The queries of all panels."""
    for file in DASHBOARDS:
        for panel in panels(file):
            for target in panel["targets"]:
                yield Asked(f"{file.stem}: {panel['title']}: {target['legendFormat']}", target["expr"])


def rules() -> list[dict[str, Any]]:
    """All rules, of both kinds."""
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def alerts() -> dict[str, dict[str, Any]]:
    """The alerting rules by their names."""
    return {rule["alert"]: rule for rule in rules() if "alert" in rule}


def manifests(name: str) -> list[dict[str, Any]]:
    """The objects of an example for Kubernetes."""
    return list(yaml.safe_load_all((OBSERVABILITY / "kubernetes" / name).read_text()))


def metrics_in(expr: str) -> set[str]:
    """Names of metrics in a query, without the suffixes of histograms."""
    return {family(name) for name in _METRIC.findall(_SELECTORS.sub("", _STRINGS.sub('""', expr)))}


def family(name: str) -> str:
    """The name of a histogram, of one of its series."""
    return re.sub(r"_(bucket|sum|count)$", "", name)


def foreign_names() -> tuple[set[str], set[str]]:
    """Metrics that dashboards of others query: those that are served, and those that are not."""
    absent = {name for group in FOREIGN["not_served"] for name in group["metrics"]}
    return {name for board in FOREIGN["dashboards"] for name in board["metrics"]} - absent, absent


def promtool(*arguments: str | Path, folder: Path = OBSERVABILITY) -> str:
    """What promtool says. Fails with it if the command fails."""
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("promtool is absent (Debian's package prometheus), and it is optional: rules were not checked")
    done = subprocess.run((found, *arguments), capture_output=True, text=True, cwd=folder, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
