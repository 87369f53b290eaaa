"""New API keys and their records. Routers only read them."""

import json
import secrets
import string
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from trunkline_router.access.identity.api_keys import (
    ID_CHARACTERS,
    MOST_RECORD_BYTES,
    SECRET_CHARACTERS,
    ApiKey,
    read_record,
)
from trunkline_router.access.identity.terms import FieldError

ALPHABET = string.digits + string.ascii_letters


def new_key() -> ApiKey:
    return ApiKey(_random_text(ID_CHARACTERS), _random_text(SECRET_CHARACTERS))


def new_record(
    key: ApiKey, terms: Mapping[str, Any], now_unix_s: float, expires_unix_s: float | None
) -> dict[str, Any]:
    """A key's record as JSON; `terms` has TERMS and `note`. Raises FieldError."""
    fields = {
        "id": key.key_id,
        "hash": f"sha256:{key.digest.hex()}",
        **{name: value for name, value in terms.items() if value is not None},
        "created": written_time(now_unix_s),
    }
    if expires_unix_s is not None:
        fields["expires"] = written_time(expires_unix_s)
    read_record(fields)
    if len(json.dumps(fields)) > MOST_RECORD_BYTES:
        raise FieldError("the record", f"has more than {MOST_RECORD_BYTES} bytes: too many or too long names")
    return fields


def written_time(unix_s: float) -> str:
    """A time as in records, such as 2026-01-31T12:00:00Z."""
    return datetime.fromtimestamp(int(unix_s), UTC).isoformat().replace("+00:00", "Z")


def _random_text(length: int) -> str:
    return "".join(secrets.choice(ALPHABET) for _ in range(length))
