"""Tenants against their quotas."""

from collections.abc import Mapping, Sequence

from trunkline.v1.fleet_pb2 import QuotaView, TenantView
from trunkline_router.access.tenants import Tenant, Tenants
from trunkline_router.observe.recent.viewer import Viewer
from trunkline_router.quotas.quota import REQUESTS_PER_MINUTE, TOKENS_IN_FLIGHT, TOKENS_PER_MINUTE
from trunkline_router.quotas.shared_state.state import SharedState

MOST_TENANTS = 100


def tenants_view(
    shared: SharedState, tenants: Tenants, refused: Mapping[str, int], viewer: Viewer
) -> Sequence[TenantView]:
    """Returns the tenants that the viewer may see: those with the most running requests and refusals first.

    refused: requests that were refused lately, by tenant; 0 for other tenants that have sent requests lately
    """
    if not viewer.sees_requests:
        return []
    if not viewer.is_operator:
        own = tenant_view(shared, viewer.tenant, viewer.terms, refused, is_listed=viewer.is_listed)
        return [own]
    names = {*tenants.named, *shared.running, *refused, *shared.tenants_with_use()}
    running = shared.running
    chosen = sorted(names, key=lambda name: (-running.get(name, 0), -refused.get(name, 0), name))[:MOST_TENANTS]
    return [tenant_view(shared, name, tenants.terms(name), refused, is_listed=tenants.lists(name)) for name in chosen]


def tenant_view(
    shared: SharedState, name: str, terms: Tenant, refused: Mapping[str, int], *, is_listed: bool
) -> TenantView:
    """Returns one tenant with its quotas."""
    used = shared.used(name, is_listed=is_listed)
    quotas = terms.quotas
    limits = (
        (REQUESTS_PER_MINUTE, quotas.requests_per_minute, used.requests),
        (TOKENS_PER_MINUTE, quotas.tokens_per_minute, used.tokens),
        (TOKENS_IN_FLIGHT, quotas.tokens_in_flight, used.in_flight),
    )
    return TenantView(
        tenant=name,
        running=shared.running.get(name, 0),
        weight=terms.weight,
        lane=terms.cap,
        quotas=[QuotaView(quota=quota, limit=limit, used=value) for quota, limit, value in limits if limit is not None],
        refused=refused.get(name, 0),
    )
