"""Writes the Grafana dashboards as JSON, and the chart's copies of dashboards and rules; --check only compares.

Helm reads files of the chart's own folder only, so the chart has copies. Its dashboards are without white space,
because Kubernetes limits the size of a release.
"""

import json
import sys
from pathlib import Path

from deploy.observability.grafana.fleet import FLEET
from deploy.observability.grafana.latency import LATENCY
from deploy.observability.grafana.routing import ROUTING
from deploy.observability.grafana.tenants import TENANTS_DASHBOARD
from deploy.observability.grafana.worker import WORKER_DASHBOARD

REPOSITORY = Path(__file__).parents[2]
OBSERVABILITY = REPOSITORY / "deploy" / "observability"
CHART = REPOSITORY / "helm" / "trunkline" / "observability"
DASHBOARDS = (FLEET, WORKER_DASHBOARD, LATENCY, TENANTS_DASHBOARD, ROUTING)
RULES = "rules.yaml"


def files() -> dict[Path, str]:
    """The text of each generated file."""
    made = {CHART / RULES: (OBSERVABILITY / RULES).read_text()}
    for dashboard in DASHBOARDS:
        name = Path("dashboards") / f"{dashboard.name}.json"
        made[OBSERVABILITY / name] = json.dumps(dashboard.json(), indent=2) + "\n"
        made[CHART / name] = json.dumps(dashboard.json(), separators=(",", ":")) + "\n"
    return made


def main() -> None:
    wanted = files()
    if "--check" not in sys.argv:
        for file, text in wanted.items():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        return
    present = {file for file in wanted if file.exists() and file.read_text() == wanted[file]}
    others = {file for folder in (OBSERVABILITY, CHART) for file in (folder / "dashboards").glob("*")} - set(wanted)
    if names := sorted(str(file.relative_to(REPOSITORY)) for file in (set(wanted) - present) | others):
        sys.exit(f"{', '.join(names)}: out of date: run make observability")


if __name__ == "__main__":
    main()
