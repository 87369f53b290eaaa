"""What all calls of a client have in common."""

import math
from collections.abc import Sequence
from random import Random
from typing import Any

from trunkline.channel import KEEPALIVE_OPTIONS, MESSAGE_OPTIONS
from trunkline.client.api_key import ApiKey, KeySource, Metadata, check_transport
from trunkline.client.retries import Tries
from trunkline.errors import DeadlineExceeded, TrunklineError
from trunkline.loopback import is_local
from trunkline.names import SESSION_KEY, TENANT_KEY
from trunkline.tls import ClientTls
from trunkline.validation import session_problem, tenant_problem

RECONNECT_FIRST_MS, RECONNECT_MOST_MS = 200, 2_000  # the client reconnects to a restarted router within seconds

# grpc.health.v1 messages in serialized form, for ready(): they save clients a dependency.
HEALTH_WATCH = "/grpc.health.v1.Health/Watch"
ASKS_READINESS = b"\x0a\x09readiness"  # HealthCheckRequest(service="readiness")
SERVING = b"\x08\x01"  # HealthCheckResponse(status=SERVING)
WATCH_AGAIN_S = 0.2  # pause after a watch that failed because the router is restarting


class CallTerms:
    """Checks a client's arguments, and holds those that every call needs.

    Raises ValueError if an argument is out of range, or if the key would be sent in plaintext.
    """

    def __init__(
        self,
        address: str,
        *,
        api_key: ApiKey | None,
        tls: ClientTls | None,
        allow_insecure_key: bool,
        model: str,
        tenant: str,
        connections: int,
        timeout_s: float | None,
        retries: int,
    ) -> None:
        if connections < 1:
            raise ValueError(f"connections={connections} is out of range; allowed: 1 or more")
        if retries < 0:
            raise ValueError(f"retries={retries} is out of range; allowed: 0 or more")
        if timeout_s is not None and not timeout_s > 0.0:
            raise ValueError(f"timeout_s={timeout_s:g} is out of range; allowed: more than 0")
        if problem := tenant_problem(tenant):
            raise ValueError(f"tenant {tenant!r} {problem}")
        check_transport(address, tls, api_key, allow_insecure_key=allow_insecure_key)
        self.address = address
        self.key = KeySource(api_key)
        self._model = model
        self._tenant: Metadata = ((TENANT_KEY, tenant),) if tenant else ()
        self._timeout_s = timeout_s
        self._retries = retries
        self._rng = Random()

    def model(self, model: str | None) -> str:
        """A call's model, which is the client's unless the call names one."""
        return self._model if model is None else model

    def metadata(self, key: Metadata, session: str = "") -> Metadata:
        """A call's metadata. Raises ValueError if the session is not allowed."""
        if not session:
            return (*_trace_metadata(), *self._tenant, *key)
        if problem := session_problem(session):
            raise ValueError(f"session {session!r} {problem}")
        return (*_trace_metadata(), *self._tenant, (SESSION_KEY, session), *key)

    def tries(self, timeout_s: float | None, now_s: float) -> Tries:
        """The tries of a call that starts now.  timeout_s: the call's; None: the client's"""
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        deadline_s = None if timeout_s is None or timeout_s == math.inf else now_s + timeout_s
        return Tries(self._retries, deadline_s, self._rng)

    def channel_options(self) -> Sequence[tuple[str, Any]]:
        """For a channel with its own TCP connections."""
        return (
            *MESSAGE_OPTIONS,
            *KEEPALIVE_OPTIONS,
            ("grpc.initial_reconnect_backoff_ms", RECONNECT_FIRST_MS),
            ("grpc.max_reconnect_backoff_ms", RECONNECT_MOST_MS),
            ("grpc.use_local_subchannel_pool", 1),  # otherwise all channels to one address share a connection
            ("grpc.lb_policy_name", "round_robin"),  # over the addresses of a headless service, one for each router
            # A proxy cannot reach this machine's loopback addresses, and would see a key that is sent to one.
            *((("grpc.enable_http_proxy", 0),) if is_local(self.address) else ()),
        )

    def not_ready(self, timeout_s: float) -> DeadlineExceeded:
        return DeadlineExceeded(f"{self.address} was not ready within {timeout_s:g} s")


def closed() -> TrunklineError:
    """The error of calls of a client that was closed."""
    return TrunklineError("the client was closed")


def late() -> DeadlineExceeded:
    """The error of a call whose deadline has passed before it was sent. gRPC would send it all the same."""
    return DeadlineExceeded("the deadline passed before the request was sent")


def _trace_metadata() -> Metadata:
    """W3C trace context of the caller's span, if the caller uses OpenTelemetry."""
    try:
        from opentelemetry import propagate
    except ImportError:
        return ()
    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    return tuple(carrier.items())
