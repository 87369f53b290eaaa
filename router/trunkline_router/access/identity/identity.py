"""What a credential proves about its bearer."""

from dataclasses import dataclass
from enum import StrEnum

from trunkline.v1.generation_pb2 import Lane
from trunkline_router.quotas.quota import Quotas

ANY_TENANT = "*"  # in `acts_for`


class IdentityError(Exception):
    """Keys or settings of identities cannot be used. The message is one line without secrets."""


class Role(StrEnum):
    """What an identity may call: inference, the fleet (FleetService), or metrics, which are not served yet."""

    USER = "user"
    OPERATOR = "operator"
    SCRAPER = "scraper"


@dataclass(frozen=True, slots=True)
class Identity:
    """The bearer of a credential, and what it may do."""

    name: str  # for logs: "key:<id>" or "jwt:<subject>"; never a secret
    tenant: str
    roles: frozenset[Role]
    acts_for: frozenset[str] = frozenset()  # other tenants that it may name; "*" stands for any
    lane: "Lane.ValueType | None" = None  # the highest lane; None: the tenant's terms decide
    models: frozenset[str] | None = None  # served names that it may use; None: all
    quotas: Quotas | None = None  # None: the tenant's terms decide
    may_salt: bool = False  # may set cache_salt
    sees_cache: bool = True  # is told cached tokens and the worker
    expires_unix_s: float | None = None  # when it ends, with any allowed clock skew; None: never

    def may_act_for(self, tenant: str) -> bool:
        """Whether the identity may name this tenant."""
        return tenant == self.tenant or tenant in self.acts_for or ANY_TENANT in self.acts_for
