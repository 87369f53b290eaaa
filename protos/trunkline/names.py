"""Names of the contract: keys of the calls' metadata, grammars' digests, and enum values in flags, files, logs and the
Python client."""

from collections.abc import Iterable
from hashlib import sha256

from trunkline.status import invalid
from trunkline.v1.generation_pb2 import FinishReason, Lane
from trunkline.v1.worker_pb2 import Grammar, GrammarKind

TENANT_KEY = "x-trunkline-tenant"  # the tenant's name
SESSION_KEY = "x-trunkline-session"  # groups requests, for example by conversation
AUTHORIZATION_KEY = "authorization"  # "Bearer " and the client's API key or token
PROOF_KEY = "x-trunkline-proof"  # see proof.py
PROOF_KEY_ID_KEY = "x-trunkline-proof-key-id"  # in hex; identifies the key of the proof


def only_value(metadata: Iterable[tuple[str, str | bytes]] | None, key: str) -> str:
    """The value of a key in a call's metadata; "" if the key is absent. Raises RequestRefused (INVALID_REQUEST) if it
    is given more than once: two components might each use a different one of the values."""
    given = [str(value) for name, value in metadata or () if name == key]
    if len(given) > 1:
        raise invalid(key, "is given more than once")
    return given[0] if given else ""


def lane_name(lane: "Lane.ValueType") -> str:
    """A lane's name, such as "interactive". Raises ValueError if there is no such lane."""
    return _LANES.get(lane) or Lane.Name(lane)


def finish_name(reason: "FinishReason.ValueType") -> str:
    """A finish reason's name, such as "stop". Raises ValueError if there is no such reason."""
    return _FINISH_REASONS.get(reason) or FinishReason.Name(reason)


def grammar_digest(grammar: Grammar) -> bytes:
    """A grammar's digest, computed from its kind, in [0, 256), and its text."""
    return sha256(bytes([grammar.kind]) + grammar.text.encode()).digest()


def grammar_kind_name(kind: "GrammarKind.ValueType") -> str:
    """A grammar's kind, such as "json_schema". Raises ValueError if there is no such kind."""
    return GrammarKind.Name(kind).removeprefix("GRAMMAR_KIND_").lower()


_LANES = {lane: name.removeprefix("LANE_").lower() for name, lane in Lane.items()}
_FINISH_REASONS = {reason: name.removeprefix("FINISH_REASON_").lower() for name, reason in FinishReason.items()}
