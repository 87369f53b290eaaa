"""The entries that routers write into Redis for other routers, which may have another version.

A later version may append fields to an entry, which are ignored. Any other change gets a new format number and with it
new keys. An invalid entry is skipped by itself, so that one router's entry does not affect the reading of others.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from trunkline_router.address import is_address
from trunkline_router.quotas.convictions import CONVICTION_MS
from trunkline_router.quotas.store import Lease, NeighbourReport, WorkerKey
from trunkline_router.routing.credit import Credit
from trunkline_runtime.log import get_logger

Entry = TypeVar("Entry")

FORMAT = 1

MOST = 2**53  # choices or tokens: JSON in Lua does not carry larger numbers exactly
MOST_CREDIT_BYTES = 131_072  # size of one router's credits and tenants; larger entries are not read
MAX_REPORTED = 1024  # how many logged problems are remembered
LONGEST_NAME = 4096  # of a router, of a tenant, or of a worker with its model
MOST_EPOCH = 2**64 - 1

# The errors that decoding an invalid entry can raise.
DECODE_ERRORS = (ValueError, TypeError, OverflowError, RecursionError)


def written_credits(credits: Mapping[WorkerKey, Credit], competing: Iterable[str]) -> str:
    """A router's credits as JSON, cut to MOST_CREDIT_BYTES. Workers with the most tokens come first."""
    workers = [(key.worker_id, str(key.epoch), credit.choices, credit.tokens) for key, credit in credits.items()]
    names = list(competing)
    if len(written := json.dumps([workers, names])) > MOST_CREDIT_BYTES:
        workers.sort(key=lambda worker: worker[3], reverse=True)
    while len(written) > MOST_CREDIT_BYTES:
        workers, names = workers[: (len(workers) + 1) // 2], names[: len(names) // 2]
        written = json.dumps([workers, names])
    return written


def written_lease(lease: Lease) -> str:
    return json.dumps([lease.worker_id, str(lease.epoch), lease.model])


class EntryReader:
    """Reads the entries of other routers: None for one that cannot be read, which is logged once for each router or
    worker."""

    def __init__(self) -> None:
        self._reported: set[tuple[str, str]] = set()
        self._log = get_logger()

    def neighbour_report(self, name: str, version: int, text: Any) -> NeighbourReport:
        """The readable part of a router's credits and competing tenants."""
        whose = f"credits of {name}"
        workers, competing = self._read(whose, _two_lists, text) or ([], [])
        credits = (self._read(whose, _credit, worker) for worker in workers)
        names = (self._read(f"tenants of {name}", _text, tenant) for tenant in competing)
        return NeighbourReport(version, dict(filter(None, credits)), [name for name in names if name is not None])

    def lease(self, address: str, text: Any) -> Lease | None:
        return self._read(f"lease of {address}", _lease, address, text)

    def conviction(self, name: Any, ttl_ms: Any) -> tuple[bytes, int] | None:
        """The fingerprint and its ms to live."""
        return self._read("convictions", _conviction, name, ttl_ms)

    def served(self, tenant: Any, cost: Any) -> tuple[str, float] | None:
        """The tenant and its service in cost units."""
        return self._read("served", _served, tenant, cost)

    def _read(self, whose: str, read: Callable[..., Entry], *values: Any) -> Entry | None:
        try:
            return read(*values)
        except DECODE_ERRORS as error:
            problem = f"{type(error).__name__}: {error}"[:200]
            self.warn("an entry in the shared state cannot be read", whose, problem=problem)
            return None

    def warn(self, event: str, entry: Any, **more: str) -> None:
        """Logs a problem of an entry once."""
        problem = event, str(entry)[:200]
        if problem not in self._reported:
            if len(self._reported) >= MAX_REPORTED:
                self._reported.clear()
            self._reported.add(problem)
            self._log.warning(event, entry=problem[1], **more)


def _two_lists(text: Any) -> tuple[list[Any], list[Any]]:
    workers, competing, *_ = json.loads(text)
    return list(workers), list(competing)


def _credit(worker: Any) -> tuple[WorkerKey, Credit]:
    worker_id, epoch, choices, tokens, *_ = worker
    if not 0 <= choices <= MOST or not 0 <= tokens <= MOST:
        raise ValueError(f"{choices} choices with {tokens} tokens")
    return WorkerKey(_text(worker_id), _epoch(epoch)), Credit(int(choices), int(tokens))


def _lease(address: Any, text: Any) -> Lease:
    worker_id, epoch, model, *_ = json.loads(text)
    if not is_address(_text(address)):
        raise ValueError(f"{address[:100]!r} is not host:port")
    return Lease(address, _text(worker_id), _epoch(epoch), _text(model))


def _conviction(name: Any, ttl_ms: Any) -> tuple[bytes, int]:
    if not 0 < ttl_ms <= CONVICTION_MS:
        raise ValueError(f"{ttl_ms:g} ms to live")
    return bytes.fromhex(name), int(ttl_ms)


def _served(tenant: Any, cost: Any) -> tuple[str, float]:
    if not 0 <= cost <= MOST:
        raise ValueError(f"{cost:g} cost units")
    return _text(tenant), float(cost)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{type(value).__name__} in the place of text")
    value.encode()  # raises for half of a surrogate pair
    if len(value) > LONGEST_NAME:
        raise ValueError(f"{len(value)} characters")
    return value


def _epoch(value: Any) -> int:
    epoch = int(value)
    if not 0 <= epoch <= MOST_EPOCH:
        raise ValueError("an epoch out of range")
    return epoch
