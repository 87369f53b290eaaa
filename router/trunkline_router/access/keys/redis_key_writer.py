"""API keys in Redis as `trunkline keys` changes them: it alone creates, revokes and seals records."""

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from trunkline_router.access.identity.identity import IdentityError
from trunkline_router.access.identity.redis_keys import RedisKeys
from trunkline_router.access.identity.terms import loaded
from trunkline_router.quotas.store import StoreDown

RESEAL_ROUNDS = 8  # each for records that others wrote meanwhile
ANY = "*"  # whatever record there is


class RedisKeyWriter(RedisKeys):
    """The records of API keys in Redis, which it also changes."""

    async def put(self, fields: Mapping[str, Any]) -> None:
        """Writes a record, which is valid. Raises StoreDown."""
        if not self._redis.is_connected:
            await self._redis.connect()
        await self._put([(fields["id"], ANY, self._seal.sealed(json.dumps(fields)))])

    def fields_of(self, key_id: str) -> dict[str, Any]:
        """The record of a known key, as JSON."""
        fields: dict[str, Any] = loaded(self._text_of(key_id))
        return fields

    def seal_of(self, key_id: str) -> int:
        """The number of the secret that has sealed a known key's record, 0 for the current one."""
        return self._known[key_id].seal

    @property
    def sealed_before(self) -> list[str]:
        """The ids of known keys whose records an earlier secret has sealed."""
        return [key_id for key_id, known in self._known.items() if known.seal]

    async def reseal(self, pause: Callable[[], Awaitable[None]]) -> int:
        """Seals the records that an earlier secret has sealed with the current one. Returns their number. A record that
        is revoked meanwhile stays revoked. One that was forged with an earlier secret is sealed like any other.

        pause: lets routers poll. Those without the current secret in the first place then write back what they know;
        that raises IdentityError. A router that cannot reach Redis meanwhile is not noticed. Raises StoreDown if Redis
        does not answer, or if the records do not stop changing.
        """
        resealed = await self._reseal()
        await pause()
        if await self._missing():
            raise IdentityError(
                "a router wrote records with an earlier seal back, so it was not started with this file yet: restart "
                "all routers with it, then seal again"
            )
        return resealed

    async def _reseal(self) -> int:
        resealed = 0
        for _ in range(RESEAL_ROUNDS):
            await self.update()
            left = self.sealed_before
            if not left:
                return resealed
            known = ((key_id, self._known[key_id]) for key_id in left)
            resealed += await self._put([(key_id, one.digest, self._resealed(key_id)) for key_id, one in known])
        raise StoreDown("other programs change the records all the time: try again")

    def _resealed(self, key_id: str) -> str:
        return self._seal.sealed(self._text_of(key_id))

    def _text_of(self, key_id: str) -> str:
        return self._known[key_id].value.partition(":")[2]
