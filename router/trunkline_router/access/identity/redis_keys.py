"""API keys in Redis.

| key | type | holds |
|---|---|---|
| `{prefix}:api-keys:1` | hash | key id → record, with the fleet's seal (fleet_secret.py) |
| `{prefix}:api-keys:1:version` | string | a random text, another one after each write |

A process that can write to Redis, but does not have the fleet's secret, cannot make or change a record: one that is not
sealed is ignored. It can hide records, or put an old one back. So nothing but a sealed record that says `revoked`
revokes a key: routers keep what they know if Redis is lost, emptied or overwritten, they do not take a revoked record
back, and they write what is missing into Redis again, for routers that start later.

Routers write sealed records as they have read them. Each write names the record that it replaces, and is done only if
Redis still has that one: else a router could overwrite a revocation that it has not seen. Only `trunkline keys` seals,
so that while the fleet's secret is changed routers with different files do not seal against each other. Of two records
the one with the newer seal counts.
"""

import asyncio
import math
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trunkline_router.access.identity.api_keys import MOST_RECORD_BYTES, KeyRecord, is_key_id, read_record
from trunkline_router.access.identity.fleet_secret import Seal
from trunkline_router.access.identity.terms import JSON_ERRORS, FieldError, loaded
from trunkline_router.quotas.redis_connection import CONNECT_TIMEOUT_S, RedisConnection, Script
from trunkline_router.quotas.redis_url import PUBLIC_AUTHORITIES, RedisTls
from trunkline_router.quotas.store import StoreDown
from trunkline_runtime.log import get_logger

FORMAT = 1
SEAL_PURPOSE = "API keys in Redis"
POLL_S = 1.0  # a revocation counts within 5 s
READ_ALL_S = 60.0  # also without a new version: a process that writes past this program sets none
ANSWER_TIMEOUT_S = 1.0
MOST_KEYS = 100_000
PAGE_KEYS = 64  # reading a page must not hold the event loop for more than about a millisecond
# Twice as many as the keys need: a hash returns some of them twice while it grows.
MOST_PAGES = 2 * MOST_KEYS // PAGE_KEYS
MOST_SEALED_BYTES = MOST_RECORD_BYTES + 65  # with the code and the colon before it
MOST_REPORTED = 1024  # logged problems that are remembered


@dataclass(frozen=True, slots=True)
class _Known:
    value: str  # the sealed record
    digest: str  # its SHA-1, by which writes name it
    seal: int  # the number of the key that sealed it, 0 for the current secret's
    record: KeyRecord

    @property
    def rank(self) -> tuple[bool, int, str]:
        """A revoked record comes before any other, then one with a newer seal. The order of the rest is arbitrary, but
        the same for all routers, so that they do not overwrite each other's."""
        return self.record.revoked_unix_s is not None, -self.seal, self.value


class RedisKeys:
    """The records of API keys in Redis. Requests read `records`, and never wait for Redis."""

    def __init__(
        self,
        url: str,
        prefix: str,
        seal: Seal,
        *,
        tls: RedisTls = PUBLIC_AUTHORITIES,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        steady_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read, self._write = scripts = tuple(
            Script(name, Path(__file__).with_name(f"{name}_keys.lua").read_text()) for name in ("read", "write")
        )
        self._redis = RedisConnection(
            url, scripts, tls=tls, connect_timeout_s=connect_timeout_s, reply_timeout_s=ANSWER_TIMEOUT_S
        )
        self._names = tuple(f"{{{prefix.rstrip(':')}}}:api-keys:{FORMAT}{end}" for end in ("", ":version"))
        self._seal = seal
        self._steady_s = steady_s
        self.has_loaded = False
        self._known: dict[str, _Known] = {}
        self._records: dict[str, KeyRecord] = {}
        self.records: Mapping[str, KeyRecord] = self._records
        self._version = ""
        self._read_all_s = -math.inf
        self._reported: set[tuple[str, str]] = set()
        self._problem = ""
        self._log = get_logger()

    async def start(self) -> None:
        """Reads the records. If Redis cannot be reached, that is logged, and run() tries again."""
        await self.poll()

    async def run(self) -> None:
        """Follows the records until it is cancelled."""
        try:
            while True:
                await asyncio.sleep(POLL_S)
                await self.poll()
        finally:
            await self.close()

    async def close(self) -> None:
        await self._redis.close()

    async def poll(self) -> None:
        """Looks for new records once. If that fails, the known ones stay valid, and it is logged once."""
        try:
            await self.update()
        except Exception as error:  # whatever Redis contains, the router goes on
            problem = str(error) if isinstance(error, StoreDown) else f"unexpected {type(error).__name__}"
            if problem != self._problem and not isinstance(error, StoreDown):
                self._log.error("unexpected error", exc_info=error)
            if not self._problem:
                self._log.warning("API keys in Redis cannot be read: the known ones stay valid", problem=problem)
            self._problem = problem
            return
        if self._problem:
            self._log.info("API keys in Redis can be read again")
            self._problem = ""

    async def update(self) -> None:
        """Reads the records if they may have changed. Raises StoreDown."""
        missing = await self._missing()
        number = await self._put([(key_id, old, self._known[key_id].value) for key_id, old in missing.items()])
        if number:
            self._log.warning(
                "API keys were missing or changed in Redis: their records were written back", num_keys=number
            )

    async def _missing(self) -> dict[str, str]:
        """Reads as update(), and writes nothing. Returns the ids of known keys whose records Redis does not have, each
        with the digest of what it has instead, "" for nothing. Raises StoreDown."""
        if not self._redis.is_connected:
            await self._redis.connect()
        try:
            return await self._read_changes()
        except (TypeError, LookupError, *JSON_ERRORS) as error:
            raise StoreDown(f"an invalid answer: {type(error).__name__}") from None

    async def _read_changes(self) -> dict[str, str]:
        """Takes all records if they may have changed. Returns as _missing()."""
        now_s = self._steady_s()
        known_version = "" if now_s >= self._read_all_s else self._version
        reply = await self._ask(self._read, known_version, "0", PAGE_KEYS, MOST_SEALED_BYTES)
        if len(reply) == 1:
            return {}
        version, cursor, page = reply
        found = self._take(page)
        for _ in range(MOST_PAGES):
            if cursor == "0":
                break
            _, cursor, page = await self._ask(self._read, "", cursor, PAGE_KEYS, MOST_SEALED_BYTES)
            found |= self._take(page)
        self._version, self._read_all_s = str(version), now_s + READ_ALL_S
        self.has_loaded = True
        known = self._known.items()
        return {key_id: found.get(key_id, "") for key_id, one in known if found.get(key_id) != one.digest}

    def _take(self, page: Any) -> dict[str, str]:
        """Takes the records of a page. Returns the digests of those that have the ids of known keys."""
        values, found = loaded(page), {}
        for key_id, value, digest in zip(values[::3], values[1::3], values[2::3], strict=True):
            known = self._known.get(key_id)
            if known is None or known.digest != digest:
                self._take_one(key_id, value, digest)
            if key_id in self._known:
                found[key_id] = digest
        return found

    def _take_one(self, key_id: Any, value: Any, digest: str) -> None:
        opened = self._seal.opened(value) if isinstance(value, str) and is_key_id(key_id) else None
        if opened is None:
            self._report(key_id, "it is not sealed with this fleet's secret")
            return
        text, seal = opened
        try:
            record = read_record(loaded(text))
        except (FieldError, *JSON_ERRORS) as error:
            self._report(key_id, str(error) if isinstance(error, FieldError) else "it is not JSON")
            return
        if record.key_id != key_id:
            self._report(key_id, "it is the record of another key")
            return
        if key_id not in self._known and len(self._known) >= MOST_KEYS:
            self._report("", f"there are more than {MOST_KEYS} keys")
            return
        read, known = _Known(value, digest, seal, record), self._known.get(key_id)
        if known is None or read.rank > known.rank:
            self._known[key_id], self._records[key_id] = read, record

    async def _put(self, changes: Sequence[tuple[str, str, str]]) -> int:
        """Writes sealed records, each (key id, digest of what it replaces, record), where Redis still has what it
        replaces. Returns the number of written ones. Raises StoreDown."""
        written = 0
        for at in range(0, len(changes), PAGE_KEYS):
            flat = [part for change in changes[at : at + PAGE_KEYS] for part in change]
            written += await self._ask(self._write, secrets.token_hex(8), *flat)
        return written

    async def _ask(self, script: Script, *arguments: str | int) -> Any:
        """The script's reply. Raises StoreDown."""
        return await self._redis.call(script, self._names, arguments)

    def _report(self, key_id: Any, problem: str) -> None:
        """Logs once per id. An invalid id is not repeated: it could be a whole key."""
        shown = key_id if is_key_id(key_id) else ""
        if len(self._reported) < MOST_REPORTED and (shown, problem) not in self._reported:
            self._reported.add((shown, problem))
            self._log.warning("an API key's record in Redis is ignored", key_id=shown, problem=problem)
