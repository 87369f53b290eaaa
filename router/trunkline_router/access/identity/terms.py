"""The terms of an identity, as an API key's record and a token's claims have them in common. Pure.

They are checked one by one. Messages name the field and what is allowed. They never repeat the value, which may be a
misplaced secret.
"""

import json
from collections.abc import Mapping
from typing import Any

from trunkline.validation import LANES, tenant_problem
from trunkline_router.access.identity.identity import ANY_TENANT, Identity, Role
from trunkline_router.quotas.quota import MOST_QUOTA, QUOTA_NAMES, Quotas

TERMS = ("tenant", "roles", "acts_for", "lane", "models", "quotas", "may_salt", "sees_cache")
MOST_NAMES = 1000  # tenants or models of one identity
LONGEST_NAME = 256

# The errors that json.loads raises for text that is not JSON.
JSON_ERRORS = (ValueError, RecursionError)


class FieldError(Exception):
    """A field is missing or invalid."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field} {problem}")
        self.field = field
        self.problem = problem


class RepeatedName(ValueError):
    """A JSON object has a name twice."""

    def __init__(self, name: str) -> None:
        super().__init__("a name appears twice in an object")
        self.name = name


def identity_from(name: str, fields: Mapping[str, Any], expires_unix_s: float | None) -> Identity:
    """The identity with the TERMS among these fields; absent and null ones have their defaults. Raises FieldError."""
    acts_for = texts_in(fields, "acts_for") or frozenset()
    for tenant in acts_for - {ANY_TENANT}:
        if tenant_problem(tenant):
            raise FieldError("acts_for", "must be a list of tenants' names; * stands for any tenant")
    lane = fields.get("lane")
    if lane is not None and (not isinstance(lane, str) or lane not in LANES):
        raise FieldError("lane", f"must be one of {', '.join(LANES)}")
    return Identity(
        name=name,
        tenant=_tenant(fields),
        roles=_roles(fields),
        acts_for=acts_for,
        lane=None if lane is None else LANES[lane],
        models=texts_in(fields, "models"),
        quotas=_quotas(fields),
        may_salt=_flag(fields, "may_salt", False),
        sees_cache=_flag(fields, "sees_cache", True),
        expires_unix_s=expires_unix_s,
    )


def texts_in(fields: Mapping[str, Any], name: str) -> frozenset[str] | None:
    """The texts in a list; None if the field is absent. Raises FieldError."""
    value = fields.get(name)
    if value is None:
        return None
    if not isinstance(value, list) or len(value) > MOST_NAMES or not all(map(_is_name, value)):
        raise FieldError(name, f"must be a list of at most {MOST_NAMES} texts of 1 to {LONGEST_NAME} characters")
    return frozenset(value)


def loaded(text: str | bytes) -> Any:
    """The value of a JSON text. Raises RepeatedName, ValueError for NaN and Infinity as well, and RecursionError."""
    return json.loads(text, object_pairs_hook=_without_repetition, parse_constant=_refuse_constant)


def is_limit(value: Any) -> bool:
    """Whether the value is a quota's."""
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MOST_QUOTA


def _tenant(fields: Mapping[str, Any]) -> str:
    tenant = fields.get("tenant")
    if tenant is None:
        raise FieldError("tenant", "is missing")
    if not isinstance(tenant, str) or not tenant or tenant == ANY_TENANT or tenant_problem(tenant):
        raise FieldError("tenant", "must be a tenant's name: 1 to 128 printable ASCII characters, and not *")
    return tenant


def _roles(fields: Mapping[str, Any]) -> frozenset[Role]:
    names = texts_in(fields, "roles")
    if names is None:
        return frozenset((Role.USER,))
    try:
        return frozenset(map(Role, names))
    except ValueError:
        raise FieldError("roles", f"must be a list of {', '.join(Role)}") from None


def _quotas(fields: Mapping[str, Any]) -> Quotas | None:
    quotas = fields.get("quotas")
    if quotas is None:
        return None
    if not isinstance(quotas, dict) or not quotas or not quotas.keys() <= set(QUOTA_NAMES):
        raise FieldError("quotas", f"must be an object with one or more of {', '.join(QUOTA_NAMES)}")
    if not all(map(is_limit, quotas.values())):
        raise FieldError("quotas", f"must have whole numbers of 1 to {MOST_QUOTA}")
    return Quotas(**quotas)


def _flag(fields: Mapping[str, Any], name: str, default: bool) -> bool:
    value = fields.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise FieldError(name, "must be true or false")
    return value


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= LONGEST_NAME and value.isprintable()


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object's entries. json would silently keep the last one of a repeated name."""
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        raise RepeatedName(next(name for name in names if names.count(name) > 1))
    return made


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number of JSON")
