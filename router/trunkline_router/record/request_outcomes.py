"""Which outcomes of requests are whose doing."""

from trunkline.status import (
    CONTEXT_LENGTH_EXCEEDED,
    DEADLINE_EXCEEDED,
    FORBIDDEN,
    INTERNAL,
    INVALID_REQUEST,
    MODEL_NOT_FOUND,
    NO_WORKER,
    OVERLOADED,
    QUARANTINED,
    QUOTA_EXCEEDED,
    UNAUTHENTICATED,
)
from trunkline_router.record.request_record import CANCELLED, UNKNOWN, RequestRecord

OK, REFUSED, FAILED = "ok", "refused", "failed"  # results; and CANCELLED
REFUSALS = frozenset(
    {
        *(INVALID_REQUEST, CONTEXT_LENGTH_EXCEEDED, MODEL_NOT_FOUND, UNAUTHENTICATED, FORBIDDEN),
        *(OVERLOADED, QUOTA_EXCEEDED, QUARANTINED),
    }
)
FAILURES = frozenset({NO_WORKER, DEADLINE_EXCEEDED, INTERNAL})
REASONS = REFUSALS | FAILURES
_WORTH_A_LOOK = FAILURES | {OVERLOADED, QUARANTINED, UNKNOWN}


def result_of(outcome: str) -> str:
    """The kind of an outcome: OK, REFUSED, FAILED, also for unknown errors, or CANCELLED."""
    if outcome in REFUSALS:
        return REFUSED
    if outcome.isupper():
        return FAILED
    return CANCELLED if outcome == CANCELLED else OK


def is_worth_a_look(record: RequestRecord) -> bool:
    """Whether the request may have failed through no fault of its client."""
    return record.outcome in _WORTH_A_LOOK and not record.fell_behind
