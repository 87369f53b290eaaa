"""The HTTP API: its paths and what answers them."""

import re
from collections.abc import Callable, Mapping

from starlette.types import ASGIApp, Receive, Scope, Send

from trunkline.status import CODE_PERMISSION_DENIED, FORBIDDEN, RequestRefused
from trunkline_router.access.identity.needed_roles import PATHS
from trunkline_router.edge.anthropic_messages import count_tokens, messages
from trunkline_router.edge.endpoint import Endpoint, Handler
from trunkline_router.edge.http.exchange import respond
from trunkline_router.edge.http.headers import http_refusal, is_local, request_id_of, response_headers
from trunkline_router.edge.http_call import Edge
from trunkline_router.edge.live.fleet_endpoints import FleetEndpoints
from trunkline_router.edge.openai.chat import chat_completions
from trunkline_router.edge.openai.completions import completions
from trunkline_router.edge.openai.models_and_tokens import detokenize, list_models, retrieve_model, tokenize
from trunkline_router.edge.openapi.page import openapi_page
from trunkline_router.edge.responses.response_endpoints import Responses
from trunkline_router.edge.responses.response_store import ResponseStore
from trunkline_router.edge.status_endpoints import MetricsEndpoint, StatusEndpoints
from trunkline_router.record.error_statuses import PROTOCOL, Header, body_for, protocol_body, status_of
from trunkline_router.record.refused_calls import RefusedCalls
from trunkline_runtime.telemetry.exposition import FreshAnswers

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
# Endpoints of OpenAI that are not served and whose paths look like that of a response: unknown paths, as all others.
UNSERVED = ("/v1/responses/compact", "/v1/responses/input_tokens")
PARAMETER = re.compile(r"{(\w+)(:path)?}")  # of a path: a segment, or with :path any text

Methods = dict[str, ASGIApp]  # the endpoints of one path, by method


class App:
    """An ASGI application that calls the endpoint of a path and a method, and refuses other paths and methods.

    endpoints: by method and path, such as "GET /v1/models/{model:path}"
    refused: is told of requests without an endpoint
    only_local_hosts: refuses requests whose Host is neither an IP address nor localhost. It protects a server that asks
    for no credentials from web pages of other origins: a page can have its own name resolved to this machine (DNS
    rebinding). To the browser, that page's requests then go to the page's own origin. They still carry the page's name.
    """

    def __init__(
        self, endpoints: Mapping[str, ASGIApp], refused: RefusedCalls, *, only_local_hosts: bool = False
    ) -> None:
        self.endpoints = endpoints
        self._refused = refused
        self._only_local_hosts = only_local_hosts
        paths: dict[str, Methods] = {}
        for name, endpoint in endpoints.items():
            method, path = name.split(" ")
            paths.setdefault(path, {})[method] = endpoint
        self._paths = {path: methods for path, methods in paths.items() if "{" not in path}
        self._patterns = [(pattern_of(path), methods) for path, methods in paths.items() if "{" in path]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._only_local_hosts and not is_local(_host_of(scope)):
            await self._refuse_host(scope, send)
            return
        methods = self._paths.get(scope["path"]) or self._found(scope)
        if methods is None:
            await self._refuse(scope, send, 404, f"there is no {scope['path']}")
            return
        method = scope["method"]
        endpoint = methods.get("GET" if method == "HEAD" else method)
        if endpoint is None:
            allowed = ", ".join([*methods, "HEAD"] if "GET" in methods else methods)
            problem = f"{scope['path']} does not take {method}"
            await self._refuse(scope, send, 405, problem, [(b"allow", allowed.encode())])
            return
        await endpoint(scope, receive, send)

    def _found(self, scope: Scope) -> Methods | None:
        """Returns the methods of a path with parameters, which the scope then has."""
        path = scope["path"]
        for pattern, methods in self._patterns:
            found = pattern.fullmatch(path)
            if found is not None and path not in UNSERVED:
                scope["path_params"] = found.groupdict()
                return methods
        return None

    async def _refuse(
        self, scope: Scope, send: Send, status: int, message: str, headers: list[Header] | None = None
    ) -> None:
        request_id = request_id_of(scope["headers"])
        self._refused.note(http_refusal(scope, PROTOCOL[status].code, status, request_id))
        body = protocol_body(status, message, scope["path"], request_id)
        await respond(send, status, body, [*response_headers(request_id), *(headers or ())])

    async def _refuse_host(self, scope: Scope, send: Send) -> None:
        refused = RequestRefused(
            CODE_PERMISSION_DENIED, FORBIDDEN, "without credentials, Host must be an IP address or localhost"
        )
        request_id, status = request_id_of(scope["headers"]), status_of(refused)
        self._refused.note(http_refusal(scope, refused.reason, status, request_id))
        await respond(send, status, body_for(scope["path"], refused, request_id), response_headers(request_id))


def http_app(
    edge: Edge,
    is_ready: Callable[[], bool],
    metrics: FreshAnswers | None,
    fleet: FleetEndpoints,
    store: ResponseStore | None = None,
    *,
    only_local_hosts: bool = False,
) -> App:
    """Returns the application.

    is_ready: whether a worker accepts requests
    metrics: the answers for scrapers; None: there is no path for them
    fleet: the live page
    store: of responses; None: they are not stored
    only_local_hosts: see App
    """
    page = openapi_page(allows_unknown_fields=edge.allows_unknown_fields, has_metrics=metrics is not None)
    handlers = {
        **HANDLERS_BY_PATH,
        **Responses(store).handlers,
        **StatusEndpoints(is_ready, page).handlers,
        **(MetricsEndpoint(metrics).handlers if metrics is not None else {}),
        **fleet.handlers,
    }
    return _app(edge, handlers, only_local_hosts=only_local_hosts)


def metrics_app(edge: Edge, metrics: FreshAnswers, *, only_local_hosts: bool = False) -> App:
    """Returns an application for scrapers alone."""
    return _app(edge, MetricsEndpoint(metrics).handlers, only_local_hosts=only_local_hosts)


def _app(edge: Edge, handlers: Mapping[str, Handler], *, only_local_hosts: bool) -> App:
    endpoints = {name: Endpoint(edge, name.partition(" ")[2], PATHS[name], handle) for name, handle in handlers.items()}
    return App(endpoints, edge.gate.refused, only_local_hosts=only_local_hosts)


def pattern_of(path: str) -> re.Pattern[str]:
    """A pattern for the paths that a path with parameters stands for, with a group for each parameter."""
    made = re.escape(path.partition("{")[0])
    for parameter in PARAMETER.finditer(path):
        made += f"(?P<{parameter[1]}>{'.*' if parameter[2] else '[^/]+'})"
        made += re.escape(path[parameter.end() :].partition("{")[0])
    return re.compile(made)


def _host_of(scope: Scope) -> bytes:
    return next((value for name, value in scope["headers"] if name == b"host"), b"")
