"""What a caller may see of the fleet."""

from dataclasses import dataclass, field

from trunkline.v1.fleet_pb2 import ViewerRights
from trunkline_router.access.access import ANONYMOUS, Caller, Tenant
from trunkline_router.access.identity.identity import Role


@dataclass(frozen=True, slots=True)
class Viewer:
    """The rights of a caller. Callers with equal rights see the same.

    sees_requests: requests, prefixes and tenants at all. Callers without credentials are strangers to each other,
        although they have one tenant
    models: that it may be told of; None: all
    """

    tenant: str
    is_operator: bool
    sees_cache: bool
    sees_requests: bool
    models: frozenset[str] | None = None
    terms: Tenant = field(default_factory=Tenant)
    is_listed: bool = False

    @classmethod
    def of(cls, caller: Caller) -> "Viewer":
        identity = caller.identity
        return cls(
            tenant=caller.tenant,
            is_operator=Role.OPERATOR in identity.roles,
            sees_cache=identity.sees_cache,
            sees_requests=identity is not ANONYMOUS,
            models=identity.models,
            terms=caller.terms,
            is_listed=caller.is_listed,
        )

    @property
    def rights(self) -> ViewerRights:
        return ViewerRights(
            tenant=self.tenant,
            is_operator=self.is_operator,
            sees_cache=self.sees_cache,
            sees_requests=self.sees_requests,
            can_drain=self.is_operator,
        )

    def may_see(self, tenant: str) -> bool:
        """Whether it may see this tenant's requests, prefixes and quotas."""
        return self.sees_requests and (self.is_operator or tenant == self.tenant)

    def may_see_model(self, model: str) -> bool:
        return self.is_operator or self.models is None or model in self.models
