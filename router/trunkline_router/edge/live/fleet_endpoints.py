"""The endpoints of the live page: FleetService over HTTP."""

from collections.abc import Mapping
from typing import ClassVar
from urllib.parse import parse_qsl

import orjson

from trunkline.status import RequestRefused, forbidden, invalid
from trunkline_router.access.access import Caller
from trunkline_router.access.identity.needed_roles import WATCHERS
from trunkline_router.edge.http.headers import check_host
from trunkline_router.edge.http.sse import event
from trunkline_router.edge.http_call import Handler, HttpCall
from trunkline_router.edge.live.fleet_json import plain, summaries_json, timeline_json, view_json
from trunkline_router.edge.live.page_files import PageFiles
from trunkline_router.edge.request_fields import Fields
from trunkline_router.observe.recent.router_requests import Kind
from trunkline_router.observe.watch.fleet_watch import FleetView, FleetWatch
from trunkline_router.observe.watch.worker_drain import WorkerDrain
from trunkline_router.record.error_statuses import openai_body

SAME = (b"same-origin", b"none")  # of Sec-Fetch-Site; none: the user typed the address
KINDS = {"": Kind.ENDED, "notable": Kind.NOTABLE, "running": Kind.RUNNING}  # by the parameter `only`


class DrainBody(Fields):
    """The body of POST /fleet/workers/{worker}/drain.

    timeout_s: time for running requests to finish; null: the worker's own setting
    """

    timeout_s: float | None = None

    needs_body: ClassVar[bool] = False


class UndrainBody(Fields):
    """The body of POST /fleet/workers/{worker}/undrain, which has no fields."""

    needs_body: ClassVar[bool] = False


def check_page(call: HttpCall) -> None:
    """Raises RequestRefused (FORBIDDEN) for a request that another page than the router's own sends from an operator's
    browser. Clients that are no browsers send neither Sec-Fetch-Site nor Origin.

    Credentials are in a header, which such pages cannot set without being allowed by --cors-origins. But a router
    without identities asks for none, even if it admits anonymous callers, and then the browser's own place in the
    network would be the credential.
    """
    found = {name: value.lower() for name, value in call.scope["headers"]}
    site, origin, host = found.get(b"sec-fetch-site"), found.get(b"origin"), found.get(b"host", b"")
    is_own = origin is None or origin.partition(b"://")[2] == host
    if site is not None:  # pages cannot set it
        is_own = site in SAME
    if not is_own:
        raise forbidden("requests of web pages of other origins are refused here")
    if not call.edge.access.is_checked:
        check_host(call.scope["headers"])


class ViewEvents:
    """Writes views as server-sent events; a StreamWriter."""

    def events(self, response: FleetView) -> bytes:
        return event(view_json(response), b"snapshot" if response.is_first else b"update")

    def end(self) -> bytes:
        return b""

    def failed(self, refused: RequestRefused) -> bytes:
        return event(openai_body(refused), b"error")


class FleetEndpoints:
    """Handlers, by method and path."""

    def __init__(self, watch: FleetWatch, drain: WorkerDrain, files: PageFiles) -> None:
        self._watch = watch
        self._drain = drain
        self._files = files

    @property
    def handlers(self) -> Mapping[str, Handler]:
        return {
            "GET /": self._files.send,
            "GET /page/{file}": self._files.send,
            "GET /fleet/events": self._events,
            "GET /fleet/requests": self._requests,
            "GET /fleet/requests/{request:path}": self._request,
            "POST /fleet/workers/{worker:path}/drain": self._drain_worker,
            "POST /fleet/workers/{worker:path}/undrain": self._undrain_worker,
        }

    async def _events(self, call: HttpCall) -> None:
        checked_query(call)

        def caller() -> Caller:
            return call.edge.access.caller(call.headers.metadata, WATCHERS, call.peer)

        if call.scope["method"] == "HEAD":  # it has no body to wait for
            await call.respond(b"", content_type=b"text/event-stream")
        else:
            await call.stream(self._watch.views(caller), ViewEvents())

    async def _requests(self, call: HttpCall) -> None:
        query = checked_query(call, "limit", "only", "tenant")
        limit, only = query.get("limit", "0"), query.get("only", "")
        if not limit.isascii() or not limit.isdigit() or len(limit) > 6:
            raise invalid("limit", "must be a whole number")
        if only not in KINDS:
            raise invalid("only", "must be notable, running, or absent")
        listed = await self._watch.list_requests(call.caller, int(limit), query.get("tenant", ""), KINDS[only])
        await call.respond(summaries_json(listed))

    async def _request(self, call: HttpCall) -> None:
        query = checked_query(call, "tenant")
        timeline = await self._watch.request(call.caller, call.scope["path_params"]["request"], query.get("tenant", ""))
        await call.respond(timeline_json(timeline))

    async def _drain_worker(self, call: HttpCall) -> None:
        checked_query(call)
        body = await call.body(DrainBody)
        name = call.scope["path_params"]["worker"]
        drained = await self._drain.drain(name, body.timeout_s, call.caller.identity.name)
        await call.respond(orjson.dumps(plain(drained)))

    async def _undrain_worker(self, call: HttpCall) -> None:
        checked_query(call)
        await call.body(UndrainBody)
        undrained = await self._drain.undrain(call.scope["path_params"]["worker"], call.caller.identity.name)
        await call.respond(orjson.dumps(plain(undrained)))


def checked_query(call: HttpCall, *known: str) -> dict[str, str]:
    """Returns the query. Raises RequestRefused: INVALID_REQUEST for a parameter that is unknown or given twice, and as
    check_page()."""
    check_page(call)
    found: dict[str, str] = {}
    for name, value in parse_qsl(call.scope["query_string"].decode("latin-1"), keep_blank_values=True):
        if name in found:
            raise invalid(name[:64], "is given more than once")
        if name not in known:
            raise invalid(name[:64], "is not a known parameter")
        found[name] = value
    return found
