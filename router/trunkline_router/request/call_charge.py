"""The charge for calls that generate nothing: Tokenize, Detokenize and ExplainRoute count as one request each and as no
tokens. As with Generate, a refused call costs nothing, so cheap checks come before the charge."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from trunkline.status import RequestRefused
from trunkline_router.access.caller import Caller
from trunkline_router.quotas.quota import Quotas
from trunkline_router.quotas.shared_state.state import SharedState


@asynccontextmanager
async def charged_call(shared: SharedState, caller: Caller) -> AsyncIterator[None]:
    """Counts one request of the caller's tenant. If the body raises RequestRefused, the count is taken back, at other
    routers with the next sync. A call that its client cancels counts. Raises RequestRefused (QUOTA_EXCEEDED)."""
    terms = caller.terms
    most = terms.quotas.requests_per_minute
    if most is None:
        yield
        return
    reservation = await shared.reserve(
        caller.tenant,
        Quotas(requests_per_minute=most),
        is_listed=caller.is_listed,
        weight=terms.weight,
        prompt_tokens=0,
        max_tokens=0,
        most_tokens=0,
        choices=1,
    )
    is_refused = False
    try:
        yield
    except RequestRefused:
        is_refused = True
        raise
    finally:
        if not is_refused:
            reservation.charge_in_full(0, 0)
        reservation.settle()
