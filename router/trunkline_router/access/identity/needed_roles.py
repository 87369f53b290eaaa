"""What each RPC and each HTTP endpoint needs: one entry for each. The router checks calls against this table, and
docs/access.md is made from it.

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
class Needed:
    """What a call needs.

    roles: of which one is enough; none: any identity may make the call
    open: callers without credentials may make it if the operator opens this
    is_open: everyone may make it, whatever the credentials
    shows_cache: its answers show the state of caches, so it is for identities that may see that
    """

    roles: frozenset[Role] = frozenset()
    open: Open | None = None
    is_open: bool = False
    shows_cache: bool = False

    @property
    def is_of_router(self) -> bool:
        """Whether the call asks for the state of the router alone: it is answered at once, and is not a request."""
        return not self.roles or self.roles == SCRAPERS


USERS, OPERATORS, SCRAPERS = (frozenset({role}) for role in (Role.USER, Role.OPERATOR, Role.SCRAPER))
WATCHERS = USERS | OPERATORS  # what they see depends on their role: observe/recent/viewer.py

HEALTH_CHECK, HEALTH_WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"

METHODS: Mapping[str, Needed] = {  # by the RPC's full name
    "/trunkline.v1.InferenceService/Generate": Needed(USERS),
    "/trunkline.v1.InferenceService/Grant": Needed(USERS, shows_cache=True),
    "/trunkline.v1.InferenceService/Embed": Needed(USERS),
    "/trunkline.v1.InferenceService/Score": Needed(USERS),
    "/trunkline.v1.InferenceService/Tokenize": Needed(USERS),
    "/trunkline.v1.InferenceService/Detokenize": Needed(USERS),
    "/trunkline.v1.InferenceService/ListModels": Needed(USERS),
    "/trunkline.v1.FleetService/ExplainRoute": Needed(OPERATORS, shows_cache=True),
    "/trunkline.v1.FleetService/ListWorkers": Needed(OPERATORS),
    "/trunkline.v1.FleetService/WatchFleet": Needed(WATCHERS),
    "/trunkline.v1.FleetService/ListRequests": Needed(WATCHERS),
    "/trunkline.v1.FleetService/GetRequest": Needed(WATCHERS),
    "/trunkline.v1.FleetService/DrainWorker": Needed(OPERATORS),
    "/trunkline.v1.FleetService/UndrainWorker": Needed(OPERATORS),
    HEALTH_CHECK: Needed(open=Open.READINESS),  # but of the service "liveness", which is open
    HEALTH_WATCH: Needed(open=Open.READINESS),
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": Needed(open=Open.REFLECTION),
}

PATHS: Mapping[str, Needed] = {  # HTTP endpoints, by method and path
    "POST /v1/completions": Needed(USERS),
    "POST /v1/chat/completions": Needed(USERS),
    "GET /v1/models": Needed(USERS),
    "GET /v1/models/{model:path}": Needed(USERS),
    "POST /v1/responses": Needed(USERS),
    "GET /v1/responses/{response}": Needed(USERS),
    "DELETE /v1/responses/{response}": Needed(USERS),
    "POST /v1/messages": Needed(USERS),
    "POST /v1/messages/count_tokens": Needed(USERS),
    "POST /v1/embeddings": Needed(USERS),
    "POST /v1/rerank": Needed(USERS),
    "POST /rerank": Needed(USERS),
    "POST /v2/rerank": Needed(USERS),
    "POST /v1/score": Needed(USERS),
    "POST /score": Needed(USERS),
    "POST /pooling": Needed(USERS),
    "POST /classify": Needed(USERS),
    "POST /tokenize": Needed(USERS),
    "POST /detokenize": Needed(USERS),
    "GET /fleet/events": Needed(WATCHERS),
    "GET /fleet/requests": Needed(WATCHERS),
    "GET /fleet/requests/{request:path}": Needed(WATCHERS),
    "POST /fleet/workers/{worker:path}/drain": Needed(OPERATORS),
    "POST /fleet/workers/{worker:path}/undrain": Needed(OPERATORS),
    # A browser sends no credentials for a page and its files. They hold no data.
    "GET /": Needed(is_open=True),
    "GET /page/{file}": Needed(is_open=True),
    "GET /health": Needed(is_open=True),
    "GET /ready": Needed(open=Open.READINESS),
    "GET /version": Needed(open=Open.VERSION),
    "GET /openapi.json": Needed(open=Open.DOCS),
    "GET /metrics": Needed(SCRAPERS, open=Open.METRICS),
}
