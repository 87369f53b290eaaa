"""The HTTP API: its paths and what answers them."""

import asyncio
import re
import time
from collections.abc import Callable, Mapping

from starlette.types import ASGIApp, Receive, Scope, Send

from trunkline.status import RequestRefused, internal
from trunkline_router.access.access import VISITOR, NoCredentials, refused_tenant
from trunkline_router.access.gate.http_passage import HttpPassage, StatusPassage
from trunkline_router.access.identity.needed_roles import PATHS, Needed
from trunkline_router.edge.anthropic.anthropic_messages import count_tokens, messages
from trunkline_router.edge.http.exchange import CutOff, respond
from trunkline_router.edge.http.headers import (
    RequestHeaders,
    check_host,
    http_refusal,
    parse_headers,
    request_id_of,
    response_headers,
)
from trunkline_router.edge.http_call import Edge, Handler, HttpCall, given_up
from trunkline_router.edge.live.fleet_endpoints import FleetEndpoints
from trunkline_router.edge.openai.chat import chat_completions
from trunkline_router.edge.openai.completions import completions
from trunkline_router.edge.openai.models_and_tokens import detokenize, list_models, retrieve_model, tokenize
from trunkline_router.edge.openapi.page import openapi_page
from trunkline_router.edge.pooling.embeddings import embeddings, pooling
from trunkline_router.edge.pooling.scores import classify, cohere_rerank, rerank, score
from trunkline_router.edge.request_fields import known_part
from trunkline_router.edge.responses.response_endpoints import Responses
from trunkline_router.edge.responses.response_store import ResponseStore
from trunkline_router.edge.status_endpoints import metrics_handlers, status_handlers
from trunkline_router.record.error_statuses import PROTOCOL, Header, body_for, protocol_body, refusal_headers, status_of
from trunkline_router.record.refused_calls import RefusedCalls
from trunkline_runtime.log import get_logger
from trunkline_runtime.telemetry.exposition import FreshAnswers

HANDLERS_BY_PATH: dict[str, Handler] = {
    "POST /v1/completions": completions,
    "POST /v1/chat/completions": chat_completions,
    "GET /v1/models": list_models,
    "GET /v1/models/{model:path}": retrieve_model,
    "POST /v1/messages": messages,
    "POST /v1/messages/count_tokens": count_tokens,
    "POST /v1/embeddings": embeddings,
    "POST /v1/rerank": rerank,
    "POST /rerank": rerank,
    "POST /v2/rerank": cohere_rerank,
    "POST /v1/score": score,
    "POST /score": score,
    "POST /pooling": pooling,
    "POST /classify": classify,
    "POST /tokenize": tokenize,
    "POST /detokenize": detokenize,
}
# Endpoints of OpenAI that are not served and whose paths look like that of a response: unknown paths, as all others.
UNSERVED = ("/v1/responses/compact", "/v1/responses/input_tokens")
WHERE_CREDENTIALS = "the header 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
PARAMETER = re.compile(r"{(\w+)(:path)?}")  # of a path: a segment, or with :path any text

Methods = dict[str, ASGIApp]  # the endpoints of one path, by method


class App:
    """An ASGI application that calls the endpoint of a path and a method, and refuses other paths and methods.

    endpoints: by method and path, such as "GET /v1/models/{model:path}"
    refused: is told of requests without an endpoint
    """

    def __init__(self, endpoints: Mapping[str, ASGIApp], refused: RefusedCalls) -> None:
        self.endpoints = endpoints
        self._refused = refused
        paths: dict[str, Methods] = {}
        for name, endpoint in endpoints.items():
            method, path = name.split(" ")
            paths.setdefault(path, {})[method] = endpoint
        self._paths = {path: methods for path, methods in paths.items() if "{" not in path}
        self._patterns = [(pattern_of(path), methods) for path, methods in paths.items() if "{" in path]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
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


class Endpoint:
    """Serves one path. A handler that raises RequestRefused before its response has begun is answered with the error's
    status. After that, it is cut off.

    route: the template of its path
    needed: what the caller needs
    """

    def __init__(self, edge: Edge, route: str, needed: Needed, handle: Handler) -> None:
        self._edge = edge
        self._route = route
        self._is_open = edge.access.is_open(needed)
        self._needs_local_host = edge.access.admits_all
        self._roles = needed.roles
        self._passage = StatusPassage if needed.is_of_router else HttpPassage
        self._handle = handle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers, call, caller, started_s = RequestHeaders(request_id=""), None, VISITOR, time.monotonic()
        failure: RequestRefused
        task = asyncio.current_task()
        assert task is not None
        try:
            peer = peer_of(scope)
            if self._needs_local_host:
                check_host(scope["headers"])
            if self._is_open:  # whatever else the headers say: probes must be answered
                headers = RequestHeaders(request_id_of(scope["headers"]))
            else:
                headers = parse_headers(scope["headers"])
                caller = self._edge.access.caller(headers.metadata, self._roles, peer)
            with self._passage(self._edge.gate, peer, caller.tenant, task.cancel) as passage:
                call = HttpCall(self._edge, scope, receive, send, headers, caller, passage)
                await self._handle(call)
            return
        except NoCredentials:
            failure = NoCredentials(WHERE_CREDENTIALS)
        except RequestRefused as refused:
            # The frames of its traceback refer to it and to the body: a cycle, which would stay in memory until the
            # garbage collector runs.
            refused.__context__ = None
            failure = refused.with_traceback(None)
        except asyncio.CancelledError as cancelled:
            given = given_up(cancelled)
            if given is None:
                raise
            failure = given
        except Exception as error:
            failure = internal(headers.request_id)
            get_logger().error("unexpected error", request_id=headers.request_id, exc_info=error)
        if call is not None and call.has_begun:
            raise CutOff
        request_id = headers.request_id or request_id_of(scope["headers"])
        if call is None or not call.is_request:
            self._note(failure, scope, request_id, caller.tenant or refused_tenant(failure), started_s)
        sent_headers = response_headers(request_id) if call is None else call.response_headers()
        body = body_for(self._route, failure, request_id)
        await respond(send, status_of(failure), body, [*sent_headers, *refusal_headers(failure)])

    def _note(self, refused: RequestRefused, scope: Scope, request_id: str, tenant: str, started_s: float) -> None:
        self._edge.gate.refused.note(
            http_refusal(
                scope,
                refused.reason,
                status_of(refused),
                request_id,
                route=self._route,
                tenant=tenant,
                field=known_part(refused.field),
                started_s=started_s,
            )
        )


def peer_of(scope: Scope) -> str:
    """Returns the client's address as gRPC writes it: "ipv4:10.0.0.1:50312"."""
    host, port = scope.get("client") or ("", 0)
    return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"


def http_app(
    edge: Edge,
    is_ready: Callable[[], bool],
    metrics: FreshAnswers | None,
    fleet: FleetEndpoints,
    store: ResponseStore | None = None,
) -> App:
    """Returns the application.

    is_ready: whether a worker accepts requests
    metrics: the answers for scrapers; None: there is no path for them
    fleet: the live page
    store: of responses; None: they are not stored
    """
    page = openapi_page(allows_unknown_fields=edge.allows_unknown_fields, has_metrics=metrics is not None)
    handlers = {
        **HANDLERS_BY_PATH,
        **Responses(store).handlers,
        **status_handlers(is_ready, page),
        **(metrics_handlers(metrics) if metrics is not None else {}),
        **fleet.handlers,
    }
    return _app(edge, handlers)


def metrics_app(edge: Edge, metrics: FreshAnswers) -> App:
    """Returns an application for scrapers alone."""
    return _app(edge, metrics_handlers(metrics))


def _app(edge: Edge, handlers: Mapping[str, Handler]) -> App:
    endpoints = {name: Endpoint(edge, name.partition(" ")[2], PATHS[name], handle) for name, handle in handlers.items()}
    return App(endpoints, edge.gate.refused)


def pattern_of(path: str) -> re.Pattern[str]:
    """A pattern for the paths that a path with parameters stands for, with a group for each parameter."""
    return re.compile(PARAMETER.sub(lambda each: f"(?P<{each[1]}>{'.*' if each[2] else '[^/]+'})", path))
