"""What routers write of themselves into Redis for other routers, and how it is read, perhaps by another version.

A later version may put more behind what stands in an entry: it is not looked at. Whatever else is different gets
another number of the format, and with it other keys. An entry that makes no sense all the same is left out, by itself:
what one router writes must not keep the others from anything else.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from trunkline_router.discovery.address import is_address
from trunkline_router.routing.credit import Credit
from trunkline_router.stores.convictions import CONVICTION_MS
from trunkline_router.stores.store import Lease, RouterNews, WorkerKey
from trunkline_runtime.log import get_logger

Entry = TypeVar("Entry")

FORMAT = 1

MOST = 2**53  # choices or tokens: beyond, numbers are not exact on the way
MOST_CREDIT_BYTES = 131_072  # of what one router says of its credits and tenants; more is not read
MOST_SAID = 1024  # entries that were complained of and are remembered
LONGEST_NAME = 4096  # of a router, a tenant, a worker with its model
MOST_EPOCH = 2**64 - 1

# What reading nonsense can raise.
NONSENSE = (ValueError, TypeError, OverflowError, RecursionError)


def written_credits(credits: Mapping[WorkerKey, Credit], competing: Iterable[str]) -> str:
    """As much of it as others read: of the workers those that the most was sent to."""
    workers = [(key.worker_id, str(key.epoch), credit.choices, credit.tokens) for key, credit in credits.items()]
    names = list(competing)
    written = json.dumps([workers, names])
    if len(written) > MOST_CREDIT_BYTES:
        workers.sort(key=lambda worker: worker[3], reverse=True)
        half = MOST_CREDIT_BYTES // 2 - 2
        written = json.dumps([_first(workers, half), _first(names, half)])
    return written


def _first(entries: Sequence[Entry], most_bytes: int) -> list[Entry]:
    """As many as make so many bytes of JSON."""
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
    """Reads others' entries; says once of each router or worker that its entry cannot be read."""

    def __init__(self) -> None:
        self._said: set[str] = set()
        self._log = get_logger()

    def router_news(self, name: str, version: int, text: Any) -> RouterNews:
        """As much of it as can be read."""

        def entry() -> RouterNews:
            workers, competing, *_ = json.loads(text)
            try:
                return RouterNews(version, dict(map(_credit, workers)), list(map(_text, competing)))
            except NONSENSE:
                pass  # what can be read of it, one by one
            read = (self._read(f"credits of {name}", _credit, worker) for worker in workers)
            names = [self._read(f"tenants of {name}", _text, named) for named in competing]
            credits = dict(pair for pair in read if pair is not None)
            return RouterNews(version, credits, [named for named in names if named is not None])

        return self._read(f"credits of {name}", entry) or RouterNews(version, {}, ())

    def lease(self, address: str, text: Any) -> Lease | None:
        def entry() -> Lease:
            worker_id, epoch, model, *_ = json.loads(text)
            return Lease(_address(address), _text(worker_id), _epoch(epoch), _text(model))

        return self._read(f"lease of {address}", entry)

    def conviction(self, name: Any, ttl_ms: Any) -> tuple[bytes, int] | None:
        def entry() -> tuple[bytes, int]:
            if not 0 < ttl_ms <= CONVICTION_MS:
                raise ValueError(f"{ttl_ms:g} ms to live")
            return bytes.fromhex(name), int(ttl_ms)

        return self._read("convictions", entry)

    def served(self, tenant: Any, cost: Any) -> tuple[str, float] | None:
        def entry() -> tuple[str, float]:
            if not 0 <= cost <= MOST:
                raise ValueError(f"{cost:g} cost units")
            return _text(tenant), float(cost)

        return self._read("served", entry)

    def cleared(self, key: str) -> None:
        """Says, once of each key, that something lay there which no router writes."""
        if self._is_new(f"key {key}"):
            self._log.warning("what no router writes was cleared from the shared state", key=key[:200])

    def too_large(self, name: Any) -> None:
        """Says, once of each router, that it says too much to be read."""
        if self._is_new(f"size of {name}"):
            self._log.warning(
                "a router's credits in the shared state are too large to be read",
                entry=str(name)[:200],
                most_bytes=MOST_CREDIT_BYTES,
            )

    def left_for_later(self, num_routers: int) -> None:
        """Says, once, that one sync has no room for what all routers say."""
        if self._is_new("routers left for later"):
            self._log.warning(
                "the shared state has more credits than one sync reads: routers are heard by turns", left=num_routers
            )

    def _read(self, whose: str, entry: Callable[..., Entry], *said: Any) -> Entry | None:
        try:
            return entry(*said)
        except NONSENSE as error:
            if self._is_new(whose):
                problem = f"{type(error).__name__}: {error}"[:200]
                self._log.warning("an entry in the shared state cannot be read", entry=whose[:200], problem=problem)
            return None

    def _is_new(self, whose: str) -> bool:
        if whose in self._said:
            return False
        if len(self._said) >= MOST_SAID:
            self._said.clear()
        self._said.add(whose)
        return True


def _credit(worker: Any) -> tuple[WorkerKey, Credit]:
    worker_id, epoch, choices, tokens, *_ = worker
    if not 0 <= choices <= MOST or not 0 <= tokens <= MOST:
        raise ValueError(f"{choices} choices with {tokens} tokens")
    return WorkerKey(_text(worker_id), _epoch(epoch)), Credit(int(choices), int(tokens))


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{type(value).__name__} in the place of text")
    value.encode()  # half a surrogate pair is no text
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
