"""API keys for tests: records, files with them, and how an authenticator answers to a key."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from trunkline.status import UNAUTHENTICATED, RequestRefused
from trunkline_router.access.identity.api_keys import ApiKey
from trunkline_router.access.identity.authenticator import Authenticator
from trunkline_router.access.keys.new_key import new_record

NOW_UNIX_S = 1_800_000_000.0


def record(key: ApiKey, *, expires_unix_s: float | None = None, **terms: Any) -> dict[str, Any]:
    return new_record(key, {"tenant": "acme", **terms}, NOW_UNIX_S - 100, expires_unix_s)


def content(*records: Mapping[str, Any]) -> bytes:
    """A key file."""
    return json.dumps({
        "keys": {fields["id"]: {name: value for name, value in fields.items() if name != "id"} for fields in records}
    }).encode()  # fmt: skip


def write(path: Path, *records: Mapping[str, Any]) -> None:
    path.write_bytes(content(*records))


def put(path: Path, text: str | bytes | None) -> None:
    """Writes what need not be a key file; None removes the file."""
    if text is None:
        path.unlink()
    else:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())


def answer(authenticator: Authenticator, credential: str) -> str:
    """The tenant of the credential, or the message with which it is refused."""
    try:
        return authenticator.identify(credential).tenant
    except RequestRefused as refused:
        if refused.reason != UNAUTHENTICATED:
            pytest.fail(f"{refused.reason}: {refused.message}")
        return refused.message
