"""The HTTP API: its paths and what answers them."""

from collections.abc import Awaitable, Callable, Mapping
from importlib.metadata import version

import orjson
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from trunkline.status import RequestRefused
from trunkline_router.edge.endpoint import Endpoint, openai_error
from trunkline_router.edge.http_call import Edge, HttpCall, metadata_of
from trunkline_router.http.errors import openai_body, status_of
from trunkline_router.http.headers import parse_headers
from trunkline_router.http.starlette_errors import HANDLERS
from trunkline_router.identity.endpoints import PATHS, Open
from trunkline_router.identity.identity import Role
from trunkline_router.openai.endpoints import chat_completions, completions
from trunkline_router.openai.models import list_models, retrieve_model
from trunkline_router.openai.tokenization import detokenize, tokenize

Handler = Callable[[HttpCall], Awaitable[None]]

HANDLERS_BY_PATH: dict[str, Handler] = {
    "POST /v1/completions": completions,
    "POST /v1/chat/completions": chat_completions,
    "GET /v1/models": list_models,
    "GET /v1/models/{model:path}": retrieve_model,
    "POST /tokenize": tokenize,
    "POST /detokenize": detokenize,
}


class App:
    """Calls the endpoints of exact paths directly: Starlette's middleware and routing would take part in every request
    and every event. Starlette serves the rest: paths with parameters, unknown ones, and other methods."""

    def __init__(self, endpoints: Mapping[tuple[str, str], ASGIApp], others: Starlette) -> None:
        self._endpoints = endpoints  # by method and path
        self._others = others

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = self._endpoints.get((scope["method"], scope["path"]), self._others)
        await endpoint(scope, receive, send)


def http_app(edge: Edge, is_ready: Callable[[], bool]) -> ASGIApp:
    """Returns the application. is_ready: whether a worker accepts requests"""
    routes, endpoints = [], {}
    for name, handle in HANDLERS_BY_PATH.items():
        method, path = name.split(" ")
        needed = PATHS[name]
        assert isinstance(needed, Role)
        endpoint = Endpoint(edge, needed, handle, openai_error)
        routes.append(Route(path, endpoint=endpoint, methods=[method]))
        if "{" not in path:
            endpoints[method, path] = endpoint
    for name, answer in _status_answers(is_ready).items():
        path = name.removeprefix("GET ")
        routes.append(Route(path, endpoint=_status_endpoint(edge, PATHS[name], answer)))
    return App(endpoints, Starlette(routes=routes, exception_handlers=HANDLERS))


StatusAnswer = Callable[[], tuple[int, dict[str, object]]]


def _status_answers(is_ready: Callable[[], bool]) -> dict[str, StatusAnswer]:
    def ready() -> tuple[int, dict[str, object]]:
        return (200, {"status": "ready"}) if is_ready() else (503, {"status": "not ready"})

    return {
        "GET /health": lambda: (200, {"status": "ok"}),  # liveness
        "GET /ready": ready,
        "GET /version": lambda: (200, {"version": version("trunkline")}),
    }


def _status_endpoint(
    edge: Edge, needed: Role | Open | None, answer: StatusAnswer
) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        try:
            if needed is not None:
                edge.access.check(metadata_of(parse_headers(request.scope["headers"])), needed)
        except RequestRefused as refused:
            return Response(openai_body(refused), status_of(refused), media_type="application/json")
        status, body = answer()
        return Response(orjson.dumps(body), status, media_type="application/json")

    return endpoint
