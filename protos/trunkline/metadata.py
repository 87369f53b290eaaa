"""What calls say beside their messages: the keys of their metadata."""

from collections.abc import Iterable

from trunkline.status import invalid

TENANT_KEY = "x-trunkline-tenant"  # who is served
SESSION_KEY = "x-trunkline-session"  # requests with an equal one belong together
PROOF_KEY = "x-trunkline-proof"  # see proof.py


def only_value(metadata: Iterable[tuple[str, str | bytes]] | None, key: str) -> str:
    """What a call says under a key; "" where it says nothing. Raises RequestRefused (INVALID_REQUEST) where the key is
    given more than once: whoever took one of the values would take it for another's."""
    given = [str(value) for name, value in metadata or () if name == key]
    if len(given) > 1:
        raise invalid(key, "is given more than once")
    return given[0] if given else ""
