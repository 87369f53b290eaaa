"""The role that each RPC and each HTTP endpoint needs, and what may be called without credentials.

A call that is not listed here is refused. Liveness is always open, because an orchestrator kills a process that does
not answer it; and so are the files of the live page.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from trunkline_router.access.identity.identity import Role


class Open(StrEnum):
    """What an operator can open to callers without credentials."""

    READINESS = "readiness"
    REFLECTION = "reflection"
    VERSION = "version"
    DOCS = "docs"
    METRICS = "metrics"


@dataclass(frozen=True, slots=True)
class RoleUnlessOpen:
    """Needs the role, unless the operator opens it."""

    role: Role
    open: Open


Roles = Role | frozenset[Role]  # one role, or one of several
Needed = Roles | Open | RoleUnlessOpen


def role_of(needed: Needed | None) -> Roles | None:
    """The role that a caller with credentials needs; None: none."""
    if isinstance(needed, RoleUnlessOpen):
        return needed.role
    return None if isinstance(needed, Open) else needed


# Roles that may watch the fleet. What they see depends on their role: lookup/viewer.py.
WATCHERS = frozenset({Role.USER, Role.OPERATOR})

HEALTH_CHECK, HEALTH_WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"

# Full names of methods. An Open value: any identity may call it, and without credentials where it is opened.
METHODS: Mapping[str, Needed] = {
    "/trunkline.v1.InferenceService/Generate": Role.USER,
    "/trunkline.v1.InferenceService/Grant": Role.USER,
    "/trunkline.v1.InferenceService/Tokenize": Role.USER,
    "/trunkline.v1.InferenceService/Detokenize": Role.USER,
    "/trunkline.v1.InferenceService/ListModels": Role.USER,
    "/trunkline.v1.FleetService/ExplainRoute": Role.OPERATOR,
    "/trunkline.v1.FleetService/ListWorkers": Role.OPERATOR,
    "/trunkline.v1.FleetService/WatchFleet": WATCHERS,
    "/trunkline.v1.FleetService/ListRequests": WATCHERS,
    "/trunkline.v1.FleetService/GetRequest": WATCHERS,
    "/trunkline.v1.FleetService/DrainWorker": Role.OPERATOR,
    "/trunkline.v1.FleetService/UndrainWorker": Role.OPERATOR,
    HEALTH_CHECK: Open.READINESS,  # but of the service "liveness", which is open
    HEALTH_WATCH: Open.READINESS,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": Open.REFLECTION,
}

# Methods whose answers show the state of caches, for identities that may see it. Anonymous callers may not.
SHOW_CACHE = frozenset({"/trunkline.v1.InferenceService/Grant", "/trunkline.v1.FleetService/ExplainRoute"})

# HTTP endpoints by method and path. None: always open.
PATHS: Mapping[str, Needed | None] = {
    "POST /v1/completions": Role.USER,
    "POST /v1/chat/completions": Role.USER,
    "GET /v1/models": Role.USER,
    "GET /v1/models/{model:path}": Role.USER,
    "POST /v1/responses": Role.USER,
    "GET /v1/responses/{response}": Role.USER,
    "DELETE /v1/responses/{response}": Role.USER,
    "POST /v1/messages": Role.USER,
    "POST /v1/messages/count_tokens": Role.USER,
    "POST /tokenize": Role.USER,
    "POST /detokenize": Role.USER,
    "GET /fleet/events": WATCHERS,
    "GET /fleet/requests": WATCHERS,
    "GET /fleet/requests/{request:path}": WATCHERS,
    "POST /fleet/workers/{worker:path}/drain": Role.OPERATOR,
    "POST /fleet/workers/{worker:path}/undrain": Role.OPERATOR,
    # A browser sends no credentials for a page and its files. They hold no data.
    "GET /": None,
    "GET /page/{file}": None,
    "GET /health": None,
    "GET /ready": Open.READINESS,
    "GET /version": Open.VERSION,
    "GET /openapi.json": Open.DOCS,
    "GET /metrics": RoleUnlessOpen(Role.SCRAPER, Open.METRICS),
}
