"""Refuses requests that web pages of other origins send from an operator's browser.

Credentials are in a header, which such pages cannot set without being allowed by --cors-origins. But a router without
identities asks for none, and then the browser's own place in the network would be the credential.
"""

from collections.abc import Sequence
from urllib.parse import urlsplit

from trunkline.status import RequestRefused
from trunkline_router.access.caller import forbidden
from trunkline_router.edge.http.headers import is_local
from trunkline_router.record.error_statuses import Header

SAME = (b"same-origin", b"none")  # of Sec-Fetch-Site; none: the user typed the address


def check_origin(headers: Sequence[Header], *, needs_local_host: bool = False) -> None:
    """Raises RequestRefused (FORBIDDEN) for a request of another origin's page. Clients that are no browsers send
    neither Sec-Fetch-Site nor Origin.

    needs_local_host: the page's own name may not lead here either (DNS rebinding): Host must be an IP address or
        localhost
    """
    found = {name: value for name, value in headers if name in (b"sec-fetch-site", b"origin", b"host")}
    site, origin, host = (found.get(name) for name in (b"sec-fetch-site", b"origin", b"host"))
    if site is not None:
        is_same = site.lower() in SAME  # pages cannot set it
    else:
        is_same = origin is None or _host_of(origin) == (host or b"").decode("latin-1").lower()
    if not is_same:
        raise _other_origin()
    if needs_local_host and not is_local(host or b""):
        raise forbidden("without credentials, Host must be an IP address or localhost")


def _host_of(origin: bytes) -> str:
    """The host and port of an origin as browsers send it; "null" has none."""
    try:
        return urlsplit(origin.decode("latin-1")).netloc.lower()
    except ValueError:
        return ""


def _other_origin() -> RequestRefused:
    return forbidden("requests of web pages of other origins are refused here")
