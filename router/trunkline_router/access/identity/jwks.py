"""Public keys that verify tokens, from a JSON Web Key Set (RFC 7517): in a file that is watched, or behind a URL."""

import asyncio
import base64
import contextlib
import math
import socket
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

from jwt import PyJWK
from jwt.exceptions import PyJWTError

from trunkline_router.access.identity.identity import IdentityError
from trunkline_router.access.identity.terms import JSON_ERRORS, loaded
from trunkline_router.access.identity.watched_file import WatchedFile
from trunkline_runtime.log import get_logger
from trunkline_runtime.own_thread import in_own_thread
from trunkline_runtime.tls_settings import is_loopback

MOST_KEYS = 100
LEAST_RSA_BITS = 2048
LONGEST_KEY_ID = 256

_RSA = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512")
# (kty, crv) → algorithms that a token may name with such a key. None is symmetric: the public key would be the secret.
ALGORITHMS: Mapping[tuple[str, str | None], Sequence[str]] = {
    ("RSA", None): _RSA,
    ("EC", "P-256"): ("ES256",),
    ("EC", "P-384"): ("ES384",),
    ("OKP", "Ed25519"): ("EdDSA",),
}
_PUBLIC_PARTS = {"RSA": ("n", "e"), "EC": ("crv", "x", "y"), "OKP": ("crv", "x")}
REFRESH_S = 300.0  # issuers publish a new key for longer than this before they sign with it
LEAST_REFRESH_S = 10.0  # after an attempt, also if tokens name unknown keys: an attacker chooses what tokens name
FETCH_TIMEOUT_S = 5.0  # of one connect or read
FETCH_S = 10.0  # of a whole answer
MOST_ANSWER_BYTES = 1 << 20
MOST_AGE_S = 86400.0  # of keys whose URL cannot be fetched again
_CHUNK_BYTES = 1 << 16
HEADERS = {"Accept": "application/json", "User-Agent": "trunkline-router"}


VerificationKey = Mapping[str, PyJWK]  # a public key, for each algorithm that may be used with it


@dataclass(frozen=True, slots=True)
class VerificationKeys:
    """Keys by their ids; a key without one has the id ""."""

    by_id: Mapping[str, Sequence[VerificationKey]] = field(default_factory=dict)

    def find(self, key_id: str | None, algorithm: str) -> PyJWK | None:
        """The key for a token's header; None if there is none. A token without a key id is for an only key."""
        if key_id is None:
            keys = [key for same_id in self.by_id.values() for key in same_id]
            candidates: Sequence[VerificationKey] = keys if len(keys) == 1 else ()
        else:
            candidates = self.by_id.get(key_id, ())
        return next((key[algorithm] for key in candidates if algorithm in key), None)


def read_jwks(content: bytes) -> VerificationKeys:
    """The keys of a set that can be used; others are left out, as RFC 7517 says. Raises IdentityError if none can."""
    try:
        found = loaded(content)
    except JSON_ERRORS:
        raise IdentityError("is not JSON") from None
    members = found.get("keys") if isinstance(found, dict) else None
    if not isinstance(members, list):
        raise IdentityError('must be a JSON Web Key Set: {"keys": […]}')
    if len(members) > MOST_KEYS:
        raise IdentityError(f"has more than {MOST_KEYS} keys")
    by_id: dict[str, list[VerificationKey]] = {}
    for member in members:
        key = _key(member) if isinstance(member, dict) else None
        if key is not None:
            by_id.setdefault(member.get("kid", ""), []).append(key)
    if not by_id:
        raise IdentityError("has no public key for signatures of a supported type: RSA, EC P-256 or P-384, Ed25519")
    return VerificationKeys(by_id)


def _key(member: Mapping[str, Any]) -> VerificationKey | None:
    kind, curve, key_id = member.get("kty"), member.get("crv"), member.get("kid", "")
    if not isinstance(kind, str) or not (curve is None or isinstance(curve, str)) or not _is_for_signatures(member):
        return None
    if not isinstance(key_id, str) or len(key_id) > LONGEST_KEY_ID:
        return None
    algorithms = ALGORITHMS.get((kind, curve), ())
    if "alg" in member:
        algorithms = [algorithm for algorithm in algorithms if algorithm == member["alg"]]
    public = {"kty": kind, **{part: member.get(part) for part in _PUBLIC_PARTS.get(kind, ())}}
    try:
        keys = {algorithm: PyJWK(public, algorithm) for algorithm in algorithms}
    except (PyJWTError, ValueError, TypeError):
        return None
    if not keys or (kind == "RSA" and next(iter(keys.values())).key.key_size < LEAST_RSA_BITS):
        return None
    return keys


def _is_for_signatures(member: Mapping[str, Any]) -> bool:
    operations = member.get("key_ops", ["verify"])
    return member.get("use", "sig") == "sig" and isinstance(operations, list) and "verify" in operations


class JwksFile(WatchedFile):
    """Keys in a file."""

    has_loaded = True  # from start() on

    def __init__(self, path: str) -> None:
        super().__init__(f"--jwt-jwks={path}", path, self._take)
        self.keys = VerificationKeys()

    def ask(self) -> None:
        """A token names an unknown key. The file is followed closely anyway."""

    def _take(self, content: bytes) -> None:
        self.keys = read_jwks(content)


class JwksUrl:
    """Keys behind an https URL (http for loopback).

    If they cannot be fetched, the last ones stay valid for MOST_AGE_S after they were fetched.
    """

    def __init__(self, url: str, *, steady_s: Callable[[], float] = time.monotonic) -> None:
        self.keys = VerificationKeys()
        self.has_loaded = False
        self._url = url
        self._steady_s = steady_s
        self._context = ssl.create_default_context()
        self._connection: HTTPConnection | None = None
        self._content = b""
        self._fetched_s = -math.inf
        self._asked = asyncio.Event()
        self._fetching: asyncio.Future[bytes] | None = None
        self._problem = ""
        self._log = get_logger()

    async def start(self) -> None:
        """Fetches the keys. If that fails, it is logged, and run() tries again."""
        await self.refresh()

    async def run(self) -> None:
        """Fetches the keys from time to time, and when asked, until it is cancelled."""
        while True:
            await asyncio.sleep(LEAST_REFRESH_S)
            if not self._problem:  # a failed attempt is repeated at once
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._asked.wait(), REFRESH_S - LEAST_REFRESH_S)
            await self.refresh()

    def ask(self) -> None:
        """A token names an unknown key: fetches the keys soon, unless they were fetched just now."""
        self._asked.set()

    async def refresh(self) -> None:
        """Fetches the keys once."""
        self._asked.clear()
        try:
            content = await self._answer()
            keys = self.keys if content == self._content and self.keys.by_id else read_jwks(content)
        except (IdentityError, OSError, HTTPException, ValueError, RuntimeError) as error:  # the last: no thread starts
            self._failed(_problem(error))
            return
        self._asked.clear()  # again: a token that came meanwhile finds the new keys, or asks once more
        self.has_loaded = True
        self._fetched_s = self._steady_s()
        if self._problem:
            self._log.info("the keys of tokens can be fetched again", url=place_of(self._url))
            self._problem = ""
        self._content, self.keys = content, keys  # the same object while nothing changes: results stay cached

    async def _answer(self) -> bytes:
        """The server's answer. An attempt that outlasts its time is ended. If that takes longer, as in a lookup of the
        host's name, it is waited for again instead of starting another."""
        if self._fetching is None or self._fetching.done():
            self._fetching = in_own_thread(self._fetch, "jwks")
        # asyncio.wait does not cancel what it waits for.
        await asyncio.wait((self._fetching,), timeout=FETCH_S)
        if not self._fetching.done():
            self._end_connection()
            raise TimeoutError
        return self._fetching.result()

    def _fetch(self) -> bytes:
        """Asks the server. It follows no redirect, which could lead to plain HTTP or to an internal service: that is an
        error like any other status."""
        began_s = time.monotonic()
        parts = urlsplit(self._url)
        content = bytearray()
        with contextlib.closing(self._connect()) as self._connection:
            target = f"{parts.path or '/'}?{parts.query}" if parts.query else parts.path or "/"
            self._connection.request("GET", target, headers=HEADERS)
            with self._connection.getresponse() as response:
                if response.status != 200:
                    raise IdentityError(f"HTTP status {response.status}")
                while chunk := response.read1(_CHUNK_BYTES):
                    content += chunk
                    if len(content) > MOST_ANSWER_BYTES:
                        raise IdentityError(f"an answer of more than {MOST_ANSWER_BYTES >> 20} MiB")
                    if time.monotonic() - began_s > FETCH_S:
                        raise TimeoutError
        return bytes(content)

    def _connect(self) -> HTTPConnection:
        """A connection that is opened when it is used, through the proxy that the environment names."""
        parts = urlsplit(self._url)
        host = parts.hostname or ""
        if parts.scheme == "http":
            return HTTPConnection(host, parts.port, timeout=FETCH_TIMEOUT_S)
        asked = parts.netloc.rpartition("@")[2]  # with the port, which NO_PROXY may name, too
        proxy = "" if is_loopback(host) or proxy_bypass(asked) else getproxies().get("https", "")
        if not proxy:
            return HTTPSConnection(host, parts.port, timeout=FETCH_TIMEOUT_S, context=self._context)
        through = urlsplit(proxy if "://" in proxy else f"//{proxy}")
        connection = HTTPSConnection(
            through.hostname or "", through.port, timeout=FETCH_TIMEOUT_S, context=self._context
        )
        connection.set_tunnel(host, parts.port, _proxy_headers(through))
        return connection

    def _end_connection(self) -> None:
        """Ends the last connection while its answer is read: a server that sends a byte from time to time outlasts
        every timeout of a read."""
        sock = None if self._connection is None else self._connection.sock
        if sock is not None:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(sock, socket.SHUT_RDWR)  # TLS's own shutdown would wait for the reader

    def _failed(self, problem: str) -> None:
        age_s = self._steady_s() - self._fetched_s
        if self.has_loaded and age_s > MOST_AGE_S and self.keys.by_id:
            self.keys = VerificationKeys()
            self._log.error("the keys of tokens are too old: tokens are refused", most_age_s=MOST_AGE_S)
        if problem != self._problem:
            self._log.error(
                "the keys of tokens cannot be fetched: the last ones stay valid for a time",
                url=place_of(self._url),
                problem=problem,
            )
        self._problem = problem


JwksSource = JwksFile | JwksUrl


def place_of(url: str) -> str:
    """The URL without what may be secret in it: user, password and query."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _proxy_headers(proxy: SplitResult) -> dict[str, str]:
    """The credentials that the proxy's URL has."""
    if proxy.username is None:
        return {}
    credentials = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}"
    return {"Proxy-Authorization": "Basic " + base64.b64encode(credentials.encode()).decode()}


def _problem(error: BaseException) -> str:
    """The error in one line."""
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, HTTPException):
        return f"not HTTP: {type(error).__name__}"  # its text is what the server has sent
    return str(error).splitlines()[0] if str(error) else type(error).__name__
