"""The caller of one request: a tenant, its terms, and what the identity behind the call may do."""

import hmac
from dataclasses import dataclass, field, replace

from trunkline.names import lane_name
from trunkline.status import CODE_PERMISSION_DENIED, FORBIDDEN, RequestRefused
from trunkline.v1.generation_pb2 import Lane
from trunkline.validation import LEAST_TENANT_WEIGHT, MOST_TENANT_WEIGHT, validate_scheduling
from trunkline_router.access.identity.identity import Identity
from trunkline_router.access.tenants import Tenant

_SALT_DOMAIN = b"trunkline cache salt"
_SALT_BYTES = 16


@dataclass(frozen=True, slots=True)
class Scheduling:
    """How a request is scheduled: its tenant, weight and lane, and the salt of its cached prefixes."""

    tenant: str
    weight: float
    lane: "Lane.ValueType"  # never unspecified
    cache_salt: bytes = b""

    def corrected(self, factor: float) -> "Scheduling":
        """Returns the same with the weight multiplied by `factor`, within the bounds on weights."""
        weight = min(MOST_TENANT_WEIGHT, max(LEAST_TENANT_WEIGHT, factor * self.weight))
        return self if weight == self.weight else replace(self, weight=weight)

    @property
    def lane_name(self) -> str:
        return lane_name(self.lane)


@dataclass(frozen=True, slots=True)
class Caller:
    """What is known of the sender of a call. `terms` are those of the tenant, narrowed by the identity."""

    tenant: str
    identity: Identity
    terms: Tenant
    is_listed: bool  # the tenant has terms of its own
    salt_key: bytes = field(repr=False)

    def may_use(self, model: str) -> bool:
        """Whether the identity may use a served model of this name."""
        return self.identity.models is None or model in self.identity.models

    def check_model(self, model: str, asked: str) -> None:
        """Raises RequestRefused (FORBIDDEN) if the identity may not use the model, for which the client used the name
        `asked`."""
        if not self.may_use(model):
            raise forbidden(f"model {asked!r} is not among those that these credentials may use", field="model")

    def scheduling(self, asked: "Lane.ValueType", salt: str = "") -> Scheduling:
        """Returns the scheduling of a request for a lane; `salt`: the client's cache_salt.

        Raises RequestRefused: INVALID_REQUEST for an unknown lane, FORBIDDEN for a salt that the caller may not set.
        """
        validate_scheduling(asked, self.tenant, self.terms.weight)
        if salt and not self.identity.may_salt:
            raise forbidden("these credentials may not set a cache salt", field="cache_salt")
        return Scheduling(self.tenant, self.terms.weight, self.terms.lane(asked), self.cache_salt(salt))

    def cache_salt(self, salt: str = "") -> bytes:
        """Returns the salt of the caller's cached prefixes, empty for the prefixes that callers without a tenant share.

        It is keyed, so that no tenant can compute the hashes of another tenant's blocks.
        """
        scope = self.terms.cache_scope(self.tenant)
        if not scope and not salt:
            return b""
        parts = (_SALT_DOMAIN, scope, salt.encode())
        scoped = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
        return hmac.digest(self.salt_key, scoped, "sha256")[:_SALT_BYTES]


def forbidden(message: str, *, field: str = "") -> RequestRefused:
    """A refusal with PERMISSION_DENIED and the reason FORBIDDEN."""
    return RequestRefused(CODE_PERMISSION_DENIED, FORBIDDEN, message, field=field)
