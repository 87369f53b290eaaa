"""From a credential to an identity."""

import asyncio
import hmac
import time
from collections.abc import Callable, Mapping, Sequence

from trunkline.status import no_worker, unauthenticated
from trunkline_router.access.identity.api_keys import ApiKey, Entries, KeyRecord, read_entries, record_of
from trunkline_router.access.identity.bearer_token import BearerTokens
from trunkline_router.access.identity.fleet_secret import read_fleet_secret
from trunkline_router.access.identity.identity import Identity
from trunkline_router.access.identity.jwks import JwksFile, JwksUrl
from trunkline_router.access.identity.redis_keys import SEAL_PURPOSE, RedisKeys
from trunkline_router.access.identity.watched_file import WatchedFile
from trunkline_router.settings import RouterSettings

_WRONG_KEY = "the API key is not valid"  # also if its id is not known: ids must not be found by trying
_NO_DIGEST = bytes(32)


class KeyFileSource(WatchedFile):
    """API keys in a file. Unchanged records are not read again."""

    has_loaded = True  # from start() on

    def __init__(self, path: str) -> None:
        super().__init__(f"--api-keys={path}", path, self.take)
        self.records: Mapping[str, KeyRecord] = {}
        self._entries: Entries = {}

    def take(self, content: bytes) -> None:
        """Takes the content of the file. Raises IdentityError, and changes nothing, if a part of it is invalid."""
        entries = read_entries(content)
        records = {}
        for key_id, fields in entries.items():
            known = self.records.get(key_id) if self._entries.get(key_id) == fields else None
            records[key_id] = known or record_of(key_id, fields)
        self._entries, self.records = entries, records


KeySource = KeyFileSource | RedisKeys


class Authenticator:
    """Tells the identities of credentials, from API keys and tokens."""

    def __init__(
        self,
        key_sources: Sequence[KeySource] = (),
        tokens: BearerTokens | None = None,
        *,
        now_unix_s: Callable[[], float] = time.time,
    ) -> None:
        self._key_sources = key_sources
        self._tokens = tokens
        self._now_unix_s = now_unix_s
        self._sources = [*key_sources, *(() if tokens is None else (tokens.source,))]
        self.is_configured = bool(self._sources)

    async def start(self) -> None:
        """Reads all sources. Raises IdentityError if a file cannot be used; Redis and URLs may follow later."""
        for source in self._sources:
            await source.start()

    async def run(self) -> None:
        """Follows all sources until it is cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for source in self._sources:
                tasks.create_task(source.run())
            tasks.create_task(asyncio.Event().wait())  # also without sources it ends only when cancelled

    def identify(self, credential: str, host: str = "") -> Identity:
        """The identity that an API key or a token proves.  host: where it came from, as gRPC writes it

        Raises RequestRefused: UNAUTHENTICATED, UNAVAILABLE while the sources have never been reached, or OVERLOADED if
        the host has sent too many invalid tokens.
        """
        key = ApiKey.parse(credential)
        if key is not None and self._key_sources:
            return self._identity_of(key)
        if key is None and self._tokens is not None and "." in credential:
            return self._tokens.identify(credential, host)
        raise unauthenticated("the credential is not valid")

    def _identity_of(self, key: ApiKey) -> Identity:
        """Looks the key up each time, so that a revocation counts at once. That costs about as much as a cache."""
        records = [source.records[key.key_id] for source in self._key_sources if key.key_id in source.records]
        matching = [record for record in records if record.is_of(key)]
        if not records:
            hmac.compare_digest(_NO_DIGEST, key.digest)  # takes as long as if the id were known
            if not all(source.has_loaded for source in self._key_sources):
                raise no_worker("API keys cannot be checked yet: their store has not answered")
        if not matching:
            raise unauthenticated(_WRONG_KEY)
        # Only the bearer of the secret learns the following.
        if any(record.revoked_unix_s is not None for record in matching):
            raise unauthenticated("the API key has been revoked")
        now_unix_s = self._now_unix_s()
        if any(record.expires_unix_s is not None and now_unix_s >= record.expires_unix_s for record in matching):
            raise unauthenticated("the API key has expired")
        return matching[0].identity


def authenticator_of(settings: RouterSettings, now_unix_s: Callable[[], float] = time.time) -> Authenticator:
    """The authenticator that the settings describe. Raises IdentityError if the fleet's secret cannot be read."""
    identity = settings.identity
    secret = read_fleet_secret(identity.fleet_secret, identity.fleet_secret_file)
    sources: list[KeySource] = []
    if identity.api_keys:
        sources.append(KeyFileSource(identity.api_keys))
    if identity.api_keys_in_redis:
        seal = secret.seal(SEAL_PURPOSE)
        sources.append(RedisKeys(settings.redis_url, settings.key_prefix, seal, tls=settings.redis_tls))
    tokens = None
    if identity.jwt_jwks:
        source = JwksUrl(identity.jwt_jwks) if identity.has_jwks_url else JwksFile(identity.jwt_jwks)
        tokens = BearerTokens(source, identity, now_unix_s)
    return Authenticator(sources, tokens, now_unix_s=now_unix_s)
