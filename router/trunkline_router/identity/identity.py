"""What a credential proves."""

from dataclasses import dataclass
from enum import StrEnum

from trunkline.v1.generation_pb2 import Lane
from trunkline_router.quotas.quota import Quotas

ANY_TENANT = "*"  # in acts_for


class Role(StrEnum):
    """What an identity may call."""

    USER = "user"  # inference
    OPERATOR = "operator"  # the fleet: workers, routes, drains
    SCRAPER = "scraper"  # metrics


@dataclass(frozen=True, slots=True)
class Identity:
    """The holder of a credential. `name` identifies it in logs and is not secret."""

    name: str
    tenant: str
    roles: frozenset[Role]
    acts_for: frozenset[str] = frozenset()  # other tenants that it may name; ANY_TENANT: all
    lane: "Lane.ValueType | None" = None  # the highest lane; None: the tenant's terms decide
    models: frozenset[str] | None = None  # served names that it may use; None: all
    quotas: Quotas | None = None  # None: the tenant's terms decide
    may_salt: bool = False  # may set cache_salt
    sees_cache: bool = True  # is told the worker and its cached tokens
    expires_unix_s: float | None = None
