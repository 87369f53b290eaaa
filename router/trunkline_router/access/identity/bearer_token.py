"""Tokens (JWT, RFC 7519): signature, then claims. Results are cached, because a signature costs up to 100 µs.

The signature of a refused token costs 0.1 to 2 ms of the event loop, and anyone can send tokens with forged ones. So
each host has a budget of time for tokens that turn out to be invalid, and so have all hosts together. A host that has
used up its budget, or all hosts together theirs, can present known tokens only, until some of the budget has grown
back. A valid token costs nothing of the budget: it is known from then on.

A claim that is missing or has a wrong type is refused with a message that names it, and without its value.
"""

import base64
import binascii
import hashlib
import math
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jwt import PyJWK
from jwt.api_jws import PyJWS
from jwt.exceptions import PyJWTError

from trunkline.status import CODE_RESOURCE_EXHAUSTED, OVERLOADED, RequestRefused, no_worker, unauthenticated
from trunkline_router.access.identity.identity import Identity, Role
from trunkline_router.access.identity.jwks import ALGORITHMS, JwksSource, VerificationKeys
from trunkline_router.access.identity.terms import JSON_ERRORS, LONGEST_NAME, TERMS, FieldError, identity_from, loaded
from trunkline_router.address import network_of
from trunkline_router.identity_settings import IdentitySettings
from trunkline_router.record.rate_limits import TokenBucket

LONGEST_TOKEN = 8192  # characters
LONGEST_HEADER = 1024  # characters; one with a certificate chain is longer, and is not needed
MOST_KNOWN = 4096  # tokens whose identities or refusals are remembered
FAILURE_S = 10.0  # for which a refusal is remembered

_TOKEN = re.compile(r"[A-Za-z0-9_-]+\.[A-Za-z0-9_-]*\.[A-Za-z0-9_-]*", re.ASCII)
_ALLOWED = frozenset(name for names in ALGORITHMS.values() for name in names)
_REFUSED = "the token is not valid"
# Time for invalid tokens, as shares of one event loop's time, and how much of it may be used at once. All hosts
# together have more, so that others have room while one sends nothing else.
SHARE_OF_HOST, HOST_BURST_S = 0.01, 0.1
SHARE_IN_ALL, BURST_S = 0.04, 0.4
LEAST_RETRY_MS = 100
MOST_HOSTS = 4096  # that are remembered; the shares of all hosts together bound what a forgotten one gets again
CLOCK_SKEW_S = 60.0  # the clocks of an issuer may be off by so much
MOST_UNIX_S = 1e11  # the year 5138; larger numbers are milliseconds


class FailureBudget:
    """The time that is left for invalid tokens, in seconds."""

    def __init__(self) -> None:
        self._all = TokenBucket(SHARE_IN_ALL, BURST_S)
        self._hosts: OrderedDict[str, TokenBucket] = OrderedDict()

    def check(self, host: str, now_s: float) -> None:
        """Raises RequestRefused (OVERLOADED) if a token of this host must not be verified now."""
        of_host = self._hosts.get(network_of(host), self._all)
        wait_s = max(self._all.wait_s(now_s), of_host.wait_s(now_s))
        if wait_s > 0:
            message = "too many tokens that are not valid came from this client's host, or from all hosts"
            retry_ms = max(LEAST_RETRY_MS, math.ceil(wait_s * 1e3))
            raise RequestRefused(CODE_RESOURCE_EXHAUSTED, OVERLOADED, message, retry_delay_ms=retry_ms)

    def spend(self, host: str, cost_s: float, now_s: float) -> None:
        """Charges the time that an invalid token of this host took. The budget may become negative by one token."""
        name = network_of(host)
        of_host = self._hosts.get(name) or TokenBucket(SHARE_OF_HOST, HOST_BURST_S, now_s)
        of_host.charge(cost_s, now_s)
        self._all.charge(cost_s, now_s)
        _keep(self._hosts, name, of_host, MOST_HOSTS)


@dataclass(frozen=True, slots=True)
class _Failure:
    message: str
    expires_unix_s: float  # a token that was not valid yet may then have become valid


class BearerTokens:
    """Tells the identities of tokens. It remembers SHA-256 hashes of tokens, never a token."""

    def __init__(
        self,
        source: JwksSource,
        settings: IdentitySettings,
        now_unix_s: Callable[[], float],
        *,
        steady_s: Callable[[], float] = time.monotonic,
        cpu_s: Callable[[], float] = time.thread_time,  # other processes of a busy machine do not count
    ) -> None:
        self.source = source
        self._settings = settings
        self._now_unix_s = now_unix_s
        self._steady_s, self._cpu_s = steady_s, cpu_s
        self._budget = FailureBudget()
        self._jws = PyJWS(algorithms=sorted(_ALLOWED))
        self._of_keys: VerificationKeys = source.keys  # what the caches were made with
        self._known: OrderedDict[bytes, Identity | _Failure] = OrderedDict()  # the one used longest ago first

    def identify(self, token: str, host: str = "") -> Identity:
        """The identity of a token that came from this host.

        Raises RequestRefused: UNAUTHENTICATED, UNAVAILABLE while no keys are known yet, or OVERLOADED if the host has
        sent too many invalid tokens and this one is not known.
        """
        if len(token) > LONGEST_TOKEN or _TOKEN.fullmatch(token) is None:
            raise unauthenticated(_REFUSED)
        if self._of_keys is not self.source.keys:
            self._of_keys = self.source.keys
            self._known.clear()
        now_unix_s = self._now_unix_s()
        digest = hashlib.sha256(token.encode()).digest()
        known = self._known.get(digest)
        if known is not None and known.expires_unix_s is not None and now_unix_s < known.expires_unix_s:
            self._known.move_to_end(digest)
            if isinstance(known, _Failure):
                raise unauthenticated(known.message)
            return known
        key = self._key_of(token)
        self._budget.check(host, self._steady_s())
        began_s = self._cpu_s()
        try:
            identity = self._verified(token, key, now_unix_s)
        except RequestRefused as refusal:
            self._budget.spend(host, self._cpu_s() - began_s, self._steady_s())
            _keep(self._known, digest, _Failure(refusal.message, now_unix_s + FAILURE_S), MOST_KNOWN)
            raise
        _keep(self._known, digest, identity, MOST_KNOWN)
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
        return identity_of(claims, self._settings, now_unix_s)


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


def _keep(known: "OrderedDict[Any, Any]", name: Any, value: Any, most: int) -> None:
    """Remembers a value, and forgets the one that was used longest ago if there are too many."""
    known[name] = value
    known.move_to_end(name)
    if len(known) > most:
        known.popitem(last=False)


def identity_of(claims: Any, settings: IdentitySettings, now_unix_s: float) -> Identity:
    """The identity that the claims describe. Raises RequestRefused (UNAUTHENTICATED)."""
    if not isinstance(claims, dict):
        raise unauthenticated("the token's claims are not an object")
    try:
        expires_unix_s = _check_times(claims, now_unix_s)
        _check_parties(claims, settings)
        subject = claims.get("sub")
        if not isinstance(subject, str) or not 0 < len(subject) <= LONGEST_NAME or not subject.isprintable():
            raise FieldError("sub", f"must be a text of 1 to {LONGEST_NAME} characters")
    except FieldError as error:
        raise _refusal(error.field, error) from None
    terms = {term: _found(claims, _claim_of(term, settings)) for term in TERMS}
    try:
        terms["roles"] = _known_roles(terms["roles"])
        return identity_from(f"jwt:{subject}", terms, expires_unix_s)
    except FieldError as error:
        raise _refusal(_claim_of(error.field, settings), error) from None


def _check_times(claims: Mapping[str, Any], now_unix_s: float) -> float:
    """Returns when the token ends, with the skew. Raises RequestRefused if it does not count now, and FieldError."""
    skew_s = CLOCK_SKEW_S
    expires, not_before, issued = (_time(claims, name) for name in ("exp", "nbf", "iat"))
    if expires is None:
        raise FieldError("exp", "is missing")
    if now_unix_s >= expires + skew_s:
        raise unauthenticated("the token has expired")
    if not_before is not None and now_unix_s < not_before - skew_s:
        raise unauthenticated("the token is not valid yet: its claim nbf is in the future")
    if issued is not None and now_unix_s < issued - skew_s:
        raise unauthenticated("the token is not valid yet: its claim iat is in the future")
    return expires + skew_s


def _check_parties(claims: Mapping[str, Any], settings: IdentitySettings) -> None:
    if claims.get("iss") != settings.jwt_issuer:
        raise FieldError("iss", "is not the issuer that this server trusts")
    given = claims.get("aud")
    audiences = [given] if isinstance(given, str) else given
    if not isinstance(audiences, list) or not all(isinstance(audience, str) for audience in audiences):
        raise FieldError("aud", "must be a text or a list of texts")
    if set(settings.jwt_audience).isdisjoint(audiences):
        raise FieldError("aud", "does not name this server")


def _time(claims: Mapping[str, Any], name: str) -> float | None:
    value = claims.get(name)
    if value is None:
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= MOST_UNIX_S:  # false for NaN
        raise FieldError(name, "must be a number of seconds since 1970")
    return float(value)


def _claim_of(term: str, settings: IdentitySettings) -> str:
    """The name of the claim for one of TERMS."""
    if term == "tenant":
        return settings.jwt_tenant_claim
    return settings.jwt_roles_claim if term == "roles" else settings.jwt_claim_prefix + term


def _found(claims: Mapping[str, Any], name: str) -> Any:
    """The claim of this name or, if there is none, the value at a path of names with dots; None if there is none."""
    if name in claims:
        return claims[name]
    value: Any = claims
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _known_roles(given: Any) -> list[str] | None:
    """The roles of this program among those of a claim, which may list the roles of others; None if it is absent.

    The claim is a list, or a text of names with spaces between them, as OAuth's scope.
    """
    if given is None:
        return None
    names = given.split() if isinstance(given, str) else given
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise FieldError("roles", "must be a list of texts, or a text")
    return [name for name in names if name in set(Role)]


def _refusal(claim: str, error: FieldError) -> RequestRefused:
    return unauthenticated(f"the token's claim {claim} {error.problem}")
