"""What all links of a router to its workers have in common."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from trunkline.grant import GrantKeys
from trunkline.proof import Metadata, proof_metadata
from trunkline.tls import ClientTls
from trunkline.v1.worker_pb2 import GetModelResponse
from trunkline_router.routing.prefix_index import PrefixIndex
from trunkline_router.workers.tokenizer_pool import Tokenizers
from trunkline_router.workers.worker_names import WorkerNames
from trunkline_runtime.tls_settings import is_loopback


@dataclass(frozen=True, slots=True)
class LinkLimits:
    """Time limits of links.

    inter_token_timeout_s: a worker that has work of this router and sends nothing for this long counts as hung
    slow_start_s: time in which a new or recovered worker reaches its full share of requests
    """

    inter_token_timeout_s: float = 10.0
    slow_start_s: float = 10.0


@dataclass(frozen=True, slots=True)
class LinkSecurity:
    """How links are secured.

    tls: of connections to workers; None: plaintext
    allow_plaintext: also to workers that are not on the loopback interface
    """

    tls: ClientTls | None = None
    allow_plaintext: bool = False

    def problem(self, address: str) -> str:
        """Why a worker at host:port must not be connected; "" if it may."""
        if self.tls is not None or self.allow_plaintext or is_loopback(address.rpartition(":")[0]):
            return ""
        return "not on the loopback interface: set --worker-tls-ca, or permit plaintext with --allow-plaintext"


@dataclass(frozen=True, slots=True)
class LinkContext:
    """What all links of a router have in common."""

    router_id: str
    tokenizers: Tokenizers
    index: PrefixIndex
    on_change: Callable[[], None]  # called when requests can be sent to a worker, or no longer can
    rng: Random
    limits: LinkLimits = LinkLimits()
    grant_keys: GrantKeys = field(default_factory=GrantKeys)
    clock_s: Callable[[], float] = time.monotonic
    names: WorkerNames = field(default_factory=WorkerNames)
    security: LinkSecurity = LinkSecurity()

    def proof(self, method: str, model: GetModelResponse) -> Metadata:
        """Returns metadata that proves to the worker that this router may call the method."""
        now_unix_ms = int(time.time() * 1e3)
        key = self.grant_keys.of_worker(model)
        return proof_metadata(key, method, worker_id=model.worker_id, epoch=model.epoch, now_unix_ms=now_unix_ms)
