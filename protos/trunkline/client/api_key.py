"""The key that a client sends with each call.

Error messages and repr() never contain it: they end up in logs, as do the local variables of a traceback.
"""

import inspect
from collections.abc import Awaitable, Callable

from trunkline.loopback import is_local
from trunkline.names import AUTHORIZATION_KEY
from trunkline.tls import ClientTls

# A key, or a function that returns the current one: tokens such as JWTs expire.
ApiKey = str | Callable[[], str | Awaitable[str]]
BlockingApiKey = str | Callable[[], str]

MAX_KEY_BYTES = 7 << 10  # servers accept 8 KiB of metadata by default

Metadata = tuple[tuple[str, str], ...]


class _Hidden(str):
    """Text that repr() does not show."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "<hidden>"


class KeySource:
    """The metadata that carries a key.  api_key: None if calls are anonymous

    Raises ValueError if the key cannot be sent.
    """

    def __init__(self, api_key: ApiKey | None) -> None:
        self._ask = api_key if callable(api_key) else None
        self._fixed = () if api_key is None or callable(api_key) else _bearer(api_key)

    async def metadata(self) -> Metadata:
        """Raises ValueError if the function's key cannot be sent, and the function's own errors."""
        if self._ask is None:
            return self._fixed
        key = self._ask()
        return _bearer(key if isinstance(key, str) else await key)

    def metadata_now(self) -> Metadata:
        """The same without an event loop. Raises ValueError also if the function is asynchronous."""
        if self._ask is None:
            return self._fixed
        key = self._ask()
        if inspect.iscoroutine(key):
            key.close()
        if inspect.isawaitable(key):
            raise ValueError("api_key is an asynchronous function, which only the asynchronous client can call")
        return _bearer(key)


def check_transport(address: str, tls: ClientTls | None, api_key: ApiKey | None, *, allow_insecure_key: bool) -> None:
    """Raises ValueError if a key would leave this machine in plaintext."""
    if not allow_insecure_key and leaves_in_plaintext(address, tls, api_key):
        raise ValueError(
            f"the API key would be sent to {address} in plaintext: give tls=ClientTls(...), "
            "or allow_insecure_key=True if the network is protected otherwise"
        )


def leaves_in_plaintext(address: str, tls: ClientTls | None, api_key: ApiKey | None) -> bool:
    """Whether there is a key and it would leave this machine without TLS."""
    return api_key is not None and tls is None and not is_local(address)


def _bearer(key: object) -> Metadata:
    if not isinstance(key, str):
        raise ValueError(f"api_key must be text, not {type(key).__name__}")
    if not key or len(key) > MAX_KEY_BYTES or not key.isascii() or not key.isprintable() or " " in key:
        raise ValueError(f"api_key must be 1 to {MAX_KEY_BYTES} bytes of printable ASCII without spaces")
    return ((AUTHORIZATION_KEY, _Hidden(f"Bearer {key}")),)
