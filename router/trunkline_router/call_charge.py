"""What calls that generate nothing cost their tenants: Tokenize, Detokenize and ExplainRoute count as one request each,
and as no tokens."""

from trunkline_router.shared_state.quota import Quotas
from trunkline_router.shared_state.state import SharedState
from trunkline_router.tenants import Tenants


async def charge_call(shared: SharedState, tenants: Tenants, tenant: str) -> None:
    """Counts one request of the tenant, whatever becomes of the call. Raises RequestRefused (QUOTA_EXCEEDED)."""
    terms = tenants.terms(tenant)
    most = terms.quotas.requests_per_minute
    if most is None:
        return
    reservation = await shared.reserve(
        tenant,
        Quotas(requests_per_minute=most),
        is_listed=tenants.lists(tenant),
        weight=terms.weight,
        prompt_tokens=0,
        max_tokens=0,
        most_tokens=0,
        choices=1,
    )
    reservation.charge_in_full(0, 0)
    reservation.settle()
