"""The entries that routers write into Redis for other routers, which may have another version.

A later version may append fields to an entry, which are ignored. Any other change gets a new format number and with it
new keys. An invalid entry is skipped by itself, so that one router's entry does not affect the reading of others.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
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
    written = json.dumps([workers, names])
    if len(written) > MOST_CREDIT_BYTES:
        workers.sort(key=lambda worker: worker[3], reverse=True)
        half = MOST_CREDIT_BYTES // 2 - 2
        written = json.dumps([_first(workers, half), _first(names, half)])
    return written


def _first(entries: Sequence[Entry], most_bytes: int) -> list[Entry]:
    """The first entries, as many as fit into `most_bytes` of JSON."""
    first = []
    for entry in entries:
        most_bytes -= len(json.dumps(entry)) + 2
        if most_bytes < 0:
            break
        first.append(entry)
    return first


def written_lease(lease: Lease) -> str:
    return json.dumps([lease.worker_id, str(lease.epoch), lease.model])


class EntryReader:
    """Reads the entries of other routers. Logs once for each router or worker that its entry cannot be read."""

    def __init__(self) -> None:
        self._reported: set[str] = set()
        self._log = get_logger()

    def neighbour_report(self, name: str, version: int, text: Any) -> NeighbourReport:
        """The readable part of a router's credits and competing tenants."""

        def entry() -> NeighbourReport:
            workers, competing, *_ = json.loads(text)
            try:
                return NeighbourReport(version, dict(map(_credit, workers)), list(map(_text, competing)))
            except DECODE_ERRORS:
                pass  # below: one by one, without the invalid ones
            read = (self._read(f"credits of {name}", _credit, worker) for worker in workers)
            names = [self._read(f"tenants of {name}", _text, named) for named in competing]
            credits = dict(pair for pair in read if pair is not None)
            return NeighbourReport(version, credits, [named for named in names if named is not None])

        return self._read(f"credits of {name}", entry) or NeighbourReport(version, {}, ())

    def lease(self, address: str, text: Any) -> Lease | None:
        """The lease, or None if it cannot be read."""

        def entry() -> Lease:
            worker_id, epoch, model, *_ = json.loads(text)
            return Lease(_address(address), _text(worker_id), _epoch(epoch), _text(model))

        return self._read(f"lease of {address}", entry)

    def conviction(self, name: Any, ttl_ms: Any) -> tuple[bytes, int] | None:
        """The fingerprint and its ms to live, or None if the entry cannot be read."""

        def entry() -> tuple[bytes, int]:
            if not 0 < ttl_ms <= CONVICTION_MS:
                raise ValueError(f"{ttl_ms:g} ms to live")
            return bytes.fromhex(name), int(ttl_ms)

        return self._read("convictions", entry)

    def served(self, tenant: Any, cost: Any) -> tuple[str, float] | None:
        """The tenant and its service in cost units, or None if the entry cannot be read."""

        def entry() -> tuple[str, float]:
            if not 0 <= cost <= MOST:
                raise ValueError(f"{cost:g} cost units")
            return _text(tenant), float(cost)

        return self._read("served", entry)

    def cleared(self, key: str) -> None:
        """Logs once per key that it had invalid content, which was cleared."""
        if self._is_new(f"key {key}"):
            self._log.warning("invalid content was cleared from the shared state", key=key[:200])

    def too_large(self, name: Any) -> None:
        """Logs once per router that its credits are too large to be read."""
        if self._is_new(f"size of {name}"):
            self._log.warning(
                "a router's credits in the shared state are too large to be read",
                entry=str(name)[:200],
                most_bytes=MOST_CREDIT_BYTES,
            )

    def left_for_later(self, num_routers: int) -> None:
        """Logs once that the credits of all routers do not fit into one sync."""
        if self._is_new("routers left for later"):
            self._log.warning(
                "the shared state has more credits than one sync reads: routers are read in turns", left=num_routers
            )

    def _read(self, whose: str, entry: Callable[..., Entry], *values: Any) -> Entry | None:
        try:
            return entry(*values)
        except DECODE_ERRORS as error:
            if self._is_new(whose):
                problem = f"{type(error).__name__}: {error}"[:200]
                self._log.warning("an entry in the shared state cannot be read", entry=whose[:200], problem=problem)
            return None

    def _is_new(self, whose: str) -> bool:
        if whose in self._reported:
            return False
        if len(self._reported) >= MAX_REPORTED:
            self._reported.clear()
        self._reported.add(whose)
        return True


def _credit(worker: Any) -> tuple[WorkerKey, Credit]:
    worker_id, epoch, choices, tokens, *_ = worker
    if not 0 <= choices <= MOST or not 0 <= tokens <= MOST:
        raise ValueError(f"{choices} choices with {tokens} tokens")
    return WorkerKey(_text(worker_id), _epoch(epoch)), Credit(int(choices), int(tokens))


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


def _address(value: Any) -> str:
    address = _text(value)
    if not is_address(address):
        raise ValueError(f"{address[:100]!r} is not host:port")
    return address
