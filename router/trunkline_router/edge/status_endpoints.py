"""Endpoints that tell of the router itself: whether it lives and is ready, its version, metrics, and the page of its
API."""

from collections.abc import Callable, Mapping
from importlib.metadata import version

import orjson

from trunkline_router.access.gate.places import Bounds, Places, Sender
from trunkline_router.address import host_of, network_of
from trunkline_router.edge.http_call import Handler, HttpCall
from trunkline_runtime.telemetry.exposition import FreshAnswers

# Answers that are made or sent at a time. One host that does not read leaves room for the others.
SCRAPES = Bounds(in_all=32, of_host=8, of_connection=8, of_tenant=32)


def status_handlers(is_ready: Callable[[], bool], page: bytes) -> Mapping[str, Handler]:
    """Returns handlers, by method and path.

    is_ready: whether a worker accepts requests
    page: the page of the API, as JSON
    """

    def tells(body: bytes) -> Handler:
        return lambda call: call.respond(body)

    async def ready(call: HttpCall) -> None:
        if is_ready():
            await call.respond(b'{"status":"ready"}')
        else:
            await call.respond(b'{"status":"not ready"}', status=503)

    return {
        "GET /health": tells(b'{"status":"ok"}'),
        "GET /ready": ready,
        "GET /version": tells(orjson.dumps({"version": version("trunkline")})),
        "GET /openapi.json": tells(page),
    }


def metrics_handlers(answers: FreshAnswers) -> Mapping[str, Handler]:
    """Returns the handler for scrapers, by method and path."""
    scrapes = Places(SCRAPES, "scrapers being answered")

    async def metrics(call: HttpCall) -> None:
        network = network_of(host_of(call.peer))
        place = scrapes.take(Sender(network, network), lambda _: None)
        try:
            accept = b",".join(value for name, value in call.scope["headers"] if name == b"accept")
            body, content_type = await answers.answer(accept.decode("latin-1"))
            await call.respond(body, content_type=content_type.encode())
        finally:
            scrapes.release(place)

    return {"GET /metrics": metrics}
