"""What a dashboard is made of, and the JSON that Grafana imports."""

import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client.utils import floatToGoString

from deploy.observability.grafana.promql import MODEL, quantile
from trunkline_router.observe.metrics.request_metrics import LATENCY_BUCKETS

Json = dict[str, Any]

SCHEMA_VERSION = 39  # of Grafana 10.4; newer versions read it
COLUMNS = 24
DATASOURCE: Json = {"type": "prometheus", "uid": "${datasource}"}
TAG = "trunkline"
FIRST_TOKEN_S = 0.5  # the objective of rules.yaml; the chart replaces it by its value


@dataclass(frozen=True, slots=True)
class Query:
    """expr: PromQL; legend: a template of labels, or for a table the title of the values' column; unit: of a table's
    column; exemplars: dots that link to traces"""

    expr: str
    legend: str = "__auto"
    unit: str = "short"
    exemplars: bool = False


@dataclass(frozen=True, slots=True)
class Panel:
    """kind: timeseries, stat, table or heatmap; most: the upper end of the axis; limits: values at which a stat turns
    orange and red; a first one that is the larger one means that more is better"""

    title: str
    description: str
    queries: Sequence[Query]
    unit: str = "short"
    kind: str = "timeseries"
    width: int = 8
    height: int = 8
    stacked: bool = False
    most: float | None = None
    limits: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class Row:
    title: str
    panels: Sequence[Panel]


@dataclass(frozen=True, slots=True)
class Variable:
    """A list to choose from, filled by a query for the values of a label."""

    name: str
    title: str
    query: str


@dataclass(frozen=True, slots=True)
class Choice:
    """A list of fixed values to choose one from."""

    name: str
    title: str
    values: Sequence[str]
    chosen: str


MODELS = Variable("model", "Model", "label_values(vllm:num_requests_running, model_name)")
WORKERS = Variable("worker", "Worker", f"label_values(vllm:num_requests_running{{{MODEL}}}, worker)")
# Tenants of direct requests are known to workers alone; those whose requests were all refused, to routers alone.
OF_TENANTS = '{__name__=~"trunkline_router_tenant_requests_total|trunkline_worker_tenant_tokens_total"}'
TENANTS = Variable("tenant", "Tenant", f"label_values({OF_TENANTS}, tenant)")
# Buckets as the label le has them: 1.0, not 1.
WITHIN_TIME = Choice(
    "within",
    "First token within (s)",
    [floatToGoString(bucket) for bucket in LATENCY_BUCKETS],
    floatToGoString(FIRST_TOKEN_S),
)


@dataclass(frozen=True, slots=True)
class Dashboard:
    """name: of the file, and the end of the uid"""

    name: str
    title: str
    description: str
    rows: Sequence[Row]
    variables: Sequence[Variable | Choice] = (MODELS,)

    def json(self) -> Json:
        """What Grafana imports."""
        return {
            "uid": f"{TAG}-{self.name}",
            "title": f"Trunkline / {self.title}",
            "description": self.description,
            "tags": [TAG],
            "schemaVersion": SCHEMA_VERSION,
            "version": 1,
            "editable": True,
            "graphTooltip": 1,  # one crosshair for all panels
            "refresh": "30s",
            "time": {"from": "now-1h", "to": "now"},
            "links": [_link_to_the_others()],
            "templating": {"list": [_datasource_variable(), *map(_made_variable, self.variables)]},
            "annotations": {"list": [_alerts()]},
            "panels": _placed(self.rows),
        }


def stat(title: str, description: str, expr: str, unit: str, limits: tuple[float, float] | None = None) -> Panel:
    """A single number."""
    return Panel(title, description, [Query(expr)], unit, "stat", width=4, height=4, limits=limits)


def quantiles(histogram: str, *selectors: str) -> list[Query]:
    """Median, p90 and p99, with dots for single requests."""
    shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
    return [Query(quantile(share, histogram, *selectors), name, exemplars=True) for name, share in shares.items()]


def _placed(rows: Sequence[Row]) -> list[Json]:
    """The panels from left to right and from top to bottom, each with its number."""
    placed: list[Json] = []
    top = 0
    for row in rows:
        placed.append({"type": "row", "title": row.title, "collapsed": False, "panels": []} | _at(0, top, COLUMNS, 1))
        left, top, deepest = 0, top + 1, 0
        for panel in row.panels:
            if left + panel.width > COLUMNS:
                left, top, deepest = 0, top + deepest, 0
            placed.append(_panel(panel) | _at(left, top, panel.width, panel.height))
            left, deepest = left + panel.width, max(deepest, panel.height)
        top += deepest
    return [{"id": number} | panel for number, panel in enumerate(placed, 1)]


def _at(left: int, top: int, width: int, height: int) -> Json:
    return {"gridPos": {"x": left, "y": top, "w": width, "h": height}}


def _panel(panel: Panel) -> Json:
    lettered = list(zip(string.ascii_uppercase, panel.queries, strict=False))
    made: Json = {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": DATASOURCE,
        "targets": [_target(panel.kind, letter, query) for letter, query in lettered],
        "fieldConfig": {"defaults": _defaults(panel), "overrides": []},
        "options": _options(panel),
    }
    if panel.kind == "table":
        titles = {f"Value #{letter}": query.legend for letter, query in lettered}
        organized = {"excludeByName": {"Time": True}, "renameByName": titles}
        made["transformations"] = [{"id": "merge", "options": {}}, {"id": "organize", "options": organized}]
        made["fieldConfig"]["overrides"] = [_column(query) for query in panel.queries]
    return made


def _target(kind: str, letter: str, query: Query) -> Json:
    target: Json = {"refId": letter, "datasource": DATASOURCE, "expr": query.expr, "legendFormat": query.legend}
    if query.exemplars:
        target["exemplar"] = True
    if kind == "table":
        target |= {"format": "table", "instant": True, "range": False}
    elif kind == "heatmap":
        target["format"] = "heatmap"
    return target


def _column(query: Query) -> Json:
    return {
        "matcher": {"id": "byName", "options": query.legend},
        "properties": [{"id": "unit", "value": query.unit}],
    }


def _defaults(panel: Panel) -> Json:
    defaults: Json = {"unit": panel.unit}
    if panel.most is not None:
        defaults["max"] = panel.most
    if panel.kind == "timeseries":
        drawn: Json = {"lineWidth": 1, "showPoints": "never", "fillOpacity": 5}
        if panel.stacked:
            drawn |= {"fillOpacity": 30, "stacking": {"mode": "normal"}}
        defaults |= {"min": 0, "custom": drawn}
    if panel.limits is not None:
        orange, red = panel.limits
        steps = [("green", None), ("orange", orange), ("red", red)]
        if orange > red:
            steps = [("red", None), ("orange", red), ("green", orange)]
        coloured = [{"color": colour, "value": value} for colour, value in steps]
        defaults |= {"thresholds": {"mode": "absolute", "steps": coloured}, "color": {"mode": "thresholds"}}
    return defaults


def _options(panel: Panel) -> Json:
    match panel.kind:
        case "stat":
            calculated = {"calcs": ["lastNotNull"], "fields": "", "values": False}
            return {"reduceOptions": calculated, "graphMode": "area", "colorMode": "value", "textMode": "value"}
        case "table":
            return {"showHeader": True, "cellHeight": "sm"}
        case "heatmap":
            colours = {"mode": "scheme", "scheme": "Blues", "steps": 64}
            return {"calculate": False, "color": colours, "yAxis": {"unit": panel.unit}, "tooltip": {"mode": "single"}}
        case _:
            legend = {
                "showLegend": True,
                "displayMode": "table",
                "placement": "bottom",
                "calcs": ["lastNotNull", "max"],
            }
            return {"legend": legend, "tooltip": {"mode": "multi", "sort": "desc"}}


def _link_to_the_others() -> Json:
    options = {"asDropdown": True, "includeVars": True, "keepTime": True}
    return {"type": "dashboards", "title": "Trunkline", "tags": [TAG]} | options


def _datasource_variable() -> Json:
    return {"type": "datasource", "name": "datasource", "label": "Data source", "query": "prometheus", "refresh": 1}


def _made_variable(variable: Variable | Choice) -> Json:
    return _choice(variable) if isinstance(variable, Choice) else _variable(variable)


def _choice(choice: Choice) -> Json:
    return {
        "type": "custom",
        "name": choice.name,
        "label": choice.title,
        "query": ",".join(choice.values),
        "multi": False,
        "includeAll": False,
        "current": {"text": choice.chosen, "value": choice.chosen},
        "options": [{"text": one, "value": one} for one in choice.values],
    }


def _variable(variable: Variable) -> Json:
    """All values are chosen at first; that finds series without the label, too."""
    return {
        "type": "query",
        "name": variable.name,
        "label": variable.title,
        "datasource": DATASOURCE,
        "definition": variable.query,
        "query": {"query": variable.query, "refId": variable.name},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
    }


def _alerts() -> Json:
    """Marks the times at which an alert fired."""
    return {
        "name": "Alerts",
        "datasource": DATASOURCE,
        "enable": True,
        "iconColor": "red",
        "expr": 'ALERTS{alertname=~"Trunkline.+", alertstate="firing"}',
        "titleFormat": "{{alertname}}",
        "textFormat": "{{model_name}} {{worker}} {{tenant}}",
    }
