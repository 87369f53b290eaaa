"""The HTTP API: its paths and what answers them."""

from collections.abc import Callable, Mapping

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from trunkline_router.access.identity.needed_roles import PATHS
from trunkline_router.edge.anthropic_messages import count_tokens, messages
from trunkline_router.edge.endpoint import Endpoint, ErrorBody, Handler, anthropic_error, openai_error
from trunkline_router.edge.http.starlette_errors import error_handlers
from trunkline_router.edge.http_call import Edge
from trunkline_router.edge.live.fleet_endpoints import FleetEndpoints
from trunkline_router.edge.openai.openai_endpoints import (
    chat_completions,
    completions,
    detokenize,
    list_models,
    retrieve_model,
    tokenize,
)
from trunkline_router.edge.openapi.page import openapi_page
from trunkline_router.edge.responses.response_endpoints import Responses
from trunkline_router.edge.responses.response_store import ResponseStore
from trunkline_router.edge.status_endpoints import StatusEndpoints
from trunkline_runtime.telemetry.fresh_answers import FreshAnswers

HANDLERS_BY_PATH: dict[str, Handler] = {
    "POST /v1/completions": completions,
    "POST /v1/chat/completions": chat_completions,
    "GET /v1/models": list_models,
    "GET /v1/models/{model:path}": retrieve_model,
    "POST /v1/messages": messages,
    "POST /v1/messages/count_tokens": count_tokens,
    "POST /tokenize": tokenize,
    "POST /detokenize": detokenize,
}
# The shape of errors, where it is not OpenAI's.
ERROR_BODIES: dict[str, ErrorBody] = {
    "POST /v1/messages": anthropic_error,
    "POST /v1/messages/count_tokens": anthropic_error,
}


# Endpoints of OpenAI that are not served and whose paths look like that of a response: unknown paths, as all others.
UNSERVED = ("/v1/responses/compact", "/v1/responses/input_tokens")


class Methods:
    """Serves one path: each method by an endpoint of its own."""

    def __init__(self) -> None:
        self.endpoints: dict[str, Endpoint] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Starlette lets HEAD pass where GET does.
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        await self.endpoints[method](scope, receive, send)


class App:
    """Calls the endpoints of exact paths directly: Starlette's middleware and routing would take part in every request
    and every event. Starlette serves the rest: paths with parameters, unknown ones, and other methods."""

    def __init__(self, endpoints: Mapping[tuple[str, str], ASGIApp], others: Starlette) -> None:
        self._endpoints = endpoints  # by method and path
        self._others = others

    @property
    def routes(self) -> list[BaseRoute]:
        """All paths, with their methods."""
        return self._others.routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = self._endpoints.get((scope["method"], scope["path"]), self._others)
        await endpoint(scope, receive, send)


def http_app(
    edge: Edge,
    is_ready: Callable[[], bool],
    metrics: FreshAnswers,
    fleet: FleetEndpoints,
    store: ResponseStore | None = None,
) -> App:
    """Returns the application.

    is_ready: whether a worker accepts requests
    metrics: the answers for scrapers
    fleet: the live page
    store: of responses; None: they are not stored
    """
    routes = [Route(path, endpoint=_unserved, methods=["POST"]) for path in UNSERVED]
    paths: dict[str, Methods] = {}
    endpoints: dict[tuple[str, str], ASGIApp] = {}
    page = openapi_page(allows_unknown_fields=edge.allows_unknown_fields)
    handlers = {
        **HANDLERS_BY_PATH,
        **Responses(store).handlers,
        **StatusEndpoints(is_ready, page, metrics).handlers,
        **fleet.handlers,
    }
    for name, handle in handlers.items():
        method, path = name.split(" ")
        endpoint = Endpoint(edge, path, PATHS[name], handle, ERROR_BODIES.get(name, openai_error))
        paths.setdefault(path, Methods()).endpoints[method] = endpoint
        if "{" not in path:
            endpoints[method, path] = endpoint
    routes += [Route(path, endpoint=methods, methods=[*methods.endpoints]) for path, methods in paths.items()]
    others = Starlette(routes=routes, exception_handlers=error_handlers(edge.gate.refused))
    # A path with a slash at its end is another path. A redirect would go to the host that the request names, which may
    # be any, and to plaintext behind a proxy that ends TLS.
    others.router.redirect_slashes = False
    return App(endpoints, others)


def _unserved(request: Request) -> Response:
    raise HTTPException(404)
