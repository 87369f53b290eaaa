"""Tokens (JWT, RFC 7519): signature, then claims. Results are cached, because a signature costs up to 100 µs."""

import base64
import binascii
import hashlib
import re
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jwt import PyJWK
from jwt.api_jws import PyJWS
from jwt.exceptions import PyJWTError

from trunkline.status import RequestRefused, no_worker
from trunkline_router.access.identity.failure_budget import FailureBudget
from trunkline_router.access.identity.identity import Identity, unauthenticated
from trunkline_router.access.identity.identity_fields import JSON_ERRORS, loaded
from trunkline_router.access.identity.jwks import ALGORITHMS, VerificationKeys
from trunkline_router.access.identity.jwks_source import JwksSource
from trunkline_router.access.identity.token_claims import ClaimRules, identity_of

LONGEST_TOKEN = 8192  # characters
LONGEST_HEADER = 1024  # characters; one with a certificate chain is longer, and is not needed
MOST_IDENTITIES, MOST_FAILURES = 4096, 1024
FAILURE_S = 10.0  # for which a refusal is remembered: a token that was not valid yet may have become valid

_TOKEN = re.compile(r"[A-Za-z0-9_-]+\.[A-Za-z0-9_-]*\.[A-Za-z0-9_-]*", re.ASCII)
_ALLOWED = frozenset(name for names in ALGORITHMS.values() for name in names)
_REFUSED = "the token is not valid"


@dataclass(frozen=True, slots=True)
class _Failure:
    message: str
    until_unix_s: float


class BearerTokens:
    """Tells the identities of tokens. It remembers SHA-256 hashes of tokens, never a token."""

    def __init__(
        self,
        source: JwksSource,
        rules: ClaimRules,
        now_unix_s: Callable[[], float],
        *,
        steady_s: Callable[[], float] = time.monotonic,
        cpu_s: Callable[[], float] = time.thread_time,  # other processes of a busy machine do not count
    ) -> None:
        self.source = source
        self._rules = rules
        self._now_unix_s = now_unix_s
        self._steady_s, self._cpu_s = steady_s, cpu_s
        self._budget = FailureBudget()
        self._jws = PyJWS(algorithms=sorted(_ALLOWED))
        self._of_keys: VerificationKeys = source.keys  # what the caches were made with
        self._identities: OrderedDict[bytes, Identity] = OrderedDict()
        self._failures: OrderedDict[bytes, _Failure] = OrderedDict()

    @property
    def num_cached(self) -> int:
        return len(self._identities) + len(self._failures)

    def identify(self, token: str, host: str = "") -> Identity:
        """The identity of a token that came from this host.

        Raises RequestRefused: UNAUTHENTICATED, UNAVAILABLE while no keys are known yet, or OVERLOADED if the host has
        sent too many invalid tokens and this one is not known.
        """
        if len(token) > LONGEST_TOKEN or _TOKEN.fullmatch(token) is None:
            raise unauthenticated(_REFUSED)
        if self._of_keys is not self.source.keys:
            self._of_keys = self.source.keys
            self._identities.clear()
            self._failures.clear()
        now_unix_s = self._now_unix_s()
        digest = hashlib.sha256(token.encode()).digest()
        identity = self._identities.get(digest)
        if identity is not None and identity.expires_unix_s is not None and now_unix_s < identity.expires_unix_s:
            self._identities.move_to_end(digest)
            return identity
        failure = self._failures.get(digest)
        if failure is not None and now_unix_s < failure.until_unix_s:
            raise unauthenticated(failure.message)
        key = self._key_of(token)
        self._budget.check(host, self._steady_s())
        began_s = self._cpu_s()
        try:
            identity = self._verified(token, key, now_unix_s)
        except RequestRefused as refusal:
            self._budget.spend(host, self._cpu_s() - began_s, self._steady_s())
            self._identities.pop(digest, None)
            _keep(self._failures, digest, _Failure(refusal.message, now_unix_s + FAILURE_S), MOST_FAILURES)
            raise
        _keep(self._identities, digest, identity, MOST_IDENTITIES)
        return identity

    def _key_of(self, token: str) -> PyJWK:
        """The key that the token's header names. Raises RequestRefused; nothing is remembered then, because this is
        cheap and an attacker can make up any number of headers."""
        header = _header(token)
        algorithm, key_id = header.get("alg"), header.get("kid")
        if not isinstance(algorithm, str) or algorithm not in _ALLOWED:
            raise unauthenticated(f"the token's algorithm is not allowed; allowed: {', '.join(sorted(_ALLOWED))}")
        if not (key_id is None or isinstance(key_id, str)) or header.keys() & {"crit", "b64"}:
            raise unauthenticated(_REFUSED)
        key = self.source.keys.find(key_id, algorithm)
        if key is None:
            self.source.ask()
            if not self.source.has_loaded:
                raise no_worker("tokens cannot be verified yet: their issuer's keys are not known")
            raise unauthenticated("the token was signed with a key that is not known")
        return key

    def _verified(self, token: str, key: PyJWK, now_unix_s: float) -> Identity:
        try:
            claims = loaded(self._jws.decode(token, key, algorithms=[key.algorithm_name]))
        except PyJWTError:
            raise unauthenticated("the token's signature is not valid") from None
        except JSON_ERRORS:
            raise unauthenticated("the token's claims are not JSON") from None
        return identity_of(claims, self._rules, now_unix_s)


def _header(token: str) -> dict[str, Any]:
    text = token.partition(".")[0]
    if len(text) <= LONGEST_HEADER:
        try:
            header = loaded(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
        except (binascii.Error, *JSON_ERRORS):
            header = None
        if isinstance(header, dict):
            return header
    raise unauthenticated(_REFUSED)


def _keep(cache: "OrderedDict[bytes, Any]", digest: bytes, value: Any, most: int) -> None:
    """Remembers a value, and forgets the one that was used longest ago if there are too many."""
    cache[digest] = value
    cache.move_to_end(digest)
    if len(cache) > most:
        cache.popitem(last=False)
