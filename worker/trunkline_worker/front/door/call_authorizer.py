"""Restricts calls meant for routers and operators to callers that prove the worker's grant key, if it has one, and to
those whose certificates have a router's name, if the worker knows such names."""

from collections.abc import Callable
from typing import Any

import grpc

from trunkline.grant import GrantKeys, forbidden
from trunkline.proof import check_proof
from trunkline.status import RequestRefused
from trunkline_runtime.log import get_logger
from trunkline_runtime.peer_names import names_of

QUIET_MS = 60_000  # between two log lines on refused calls, because any host may cause any number of them

Context = grpc.aio.ServicerContext[Any, Any]


class CallAuthorizer:
    """Checks the proofs and certificates of calls.

    keys: without any, calls need no proof
    now_unix_ms: the clock of proofs
    router_names: names in the certificates of routers and operators; if empty, certificates' names are not checked
    """

    def __init__(
        self,
        keys: GrantKeys,
        worker_id: str,
        epoch: int,
        now_unix_ms: Callable[[], int],
        router_names: frozenset[str] = frozenset(),
    ) -> None:
        self._keys = keys
        self._worker_id = worker_id
        self._epoch = epoch
        self._now_unix_ms = now_unix_ms
        self._router_names = router_names
        self._told_unix_ms: int | None = None

    @property
    def knows_routers(self) -> bool:
        """Whether only routers and operators pass check()."""
        return bool(self._keys or self._router_names)

    def check(self, method: str, context: Context) -> None:
        """Raises RequestRefused if the caller is not a router or an operator: UNAUTHENTICATED if its metadata has no
        valid proof for this method, FORBIDDEN if its certificate has none of the names."""
        now_unix_ms = self._now_unix_ms()
        try:
            self._check_name(method, context)
            check_proof(
                self._keys,
                method,
                context.invocation_metadata(),
                worker_id=self._worker_id,
                epoch=self._epoch,
                now_unix_ms=now_unix_ms,
            )
        except RequestRefused as refused:
            if self._told_unix_ms is None or now_unix_ms - self._told_unix_ms >= QUIET_MS:
                self._told_unix_ms = now_unix_ms
                get_logger().warning("call refused", method=method, problem=refused.message)
            raise

    def check_generate(self, context: Context) -> None:
        """Raises RequestRefused (FORBIDDEN) if the worker can tell routers by their certificates alone and the caller
        is not one. With a grant key, the grant that comes with the request is checked instead."""
        if not self._keys:
            self._check_name("Generate", context)

    def _check_name(self, method: str, context: Context) -> None:
        if self._router_names and self._router_names.isdisjoint(names_of(context)):
            raise forbidden(f"{method} is for certificates with one of this worker's --tls-router-names")
