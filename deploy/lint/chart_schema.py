"""Writes the processes' settings and the possible objectives into the Helm chart's schema.

--check only compares, and fails on a difference.
"""

import json
import sys
from dataclasses import MISSING
from pathlib import Path
from typing import Any

from trunkline_router.access.tenants_file import TERMS
from trunkline_router.observe.metrics.request_metrics import LATENCY_BUCKETS
from trunkline_router.settings import RouterSettings
from trunkline_runtime.settings import base_type, flat_fields
from trunkline_worker.front_settings import WorkerSettings

SCHEMA = Path(__file__).parents[2] / "helm" / "trunkline" / "values.schema.json"
# Settings that the chart derives from other values or from the cluster, and secrets, which must not be in a ConfigMap.
SET_FOR_BOTH = {
    *("host", "port", "health_port", "grant_key", "grant_key_previous"),
    *("tls_cert", "tls_key", "tls_client_ca", "allow_plaintext", "allow_anonymous"),
}
SET_BY_CHART = {
    "routerConfig": {
        *SET_FOR_BOTH,
        *("workers", "router_id", "tenants", "http_port", "process_metrics_port", "redis_url"),
        *("redis_tls_ca", "redis_tls_cert", "redis_tls_key", "api_keys", "fleet_secret", "fleet_secret_file"),
        *("worker_tls_ca", "worker_tls_cert", "worker_tls_key", "worker_tls_name"),
    },
    "workerConfig": {
        *SET_FOR_BOTH,
        *("model", "served_model_name", "worker_id", "tls_router_names"),
        *("metrics_port", "metrics_token_file", "metrics_anonymous"),
    },
}
TYPES = {int: "integer", float: "number", bool: "boolean", str: "string", tuple: "array"}


def settings_schema(cls: type, set_by_chart: set[str]) -> dict[str, Any]:
    """A JSON schema of a settings file, without the settings that the chart sets."""
    properties = {item.name: _property(item, hint) for item, hint in flat_fields(cls) if item.name not in set_by_chart}
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _property(item: Any, hint: Any) -> dict[str, Any]:
    base = base_type(hint)
    made: dict[str, Any] = {"description": item.metadata["help"], "type": TYPES[base]}
    if base is tuple:
        made["items"] = {"type": "string"}
    for ours, theirs in (("minimum", "minimum"), ("maximum", "maximum"), ("choices", "enum")):
        if ours in item.metadata:
            made[theirs] = item.metadata[ours]
    if item.default not in (MISSING, None):
        made["default"] = item.default
    return made


def generated(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with up-to-date generated parts."""
    made: dict[str, Any] = json.loads(json.dumps(schema))
    for name, cls in (("routerConfig", RouterSettings), ("workerConfig", WorkerSettings)):
        made["$defs"][name] = settings_schema(cls, SET_BY_CHART[name])
    made["$defs"]["tenantTerms"] = {
        "type": "object",
        "additionalProperties": False,
        "properties": {term: {} for term in TERMS},
    }
    made["$defs"]["firstTokenSeconds"] = {"enum": list(LATENCY_BUCKETS)}
    normal: dict[str, Any] = json.loads(json.dumps(made))
    return normal


def main() -> None:
    present = json.loads(SCHEMA.read_text())
    wanted = generated(present)
    if "--check" not in sys.argv:
        SCHEMA.write_text(json.dumps(wanted, indent=2) + "\n")
    elif present != wanted:
        sys.exit(f"{SCHEMA.name} differs from the settings: run make chart-schema")


if __name__ == "__main__":
    main()
