"""Labels of requests in metrics. All have a fixed number of values, whatever clients send."""

from typing import NamedTuple

from trunkline_router.access.access import Tenants
from trunkline_router.access.identity.needed_roles import METHODS, PATHS
from trunkline_router.record.request_record import CANCELLED, GRANTED, REASONS, RequestRecord, result_of
from trunkline_runtime.telemetry.series import OTHER, BoundedNames

MAX_MODELS = 32
MAX_TENANTS = 100  # with three lanes and three kinds of tokens: about 900 series
SEVERAL = "several"  # outcome: a request's choices ended differently
SLOW_READER = "SLOW_READER"  # outcome: OVERLOADED, because the client read too slowly
FINISHED = frozenset({"stop", "length", GRANTED})
# As records name them: paths, and RPCs without a leading slash.
ENDPOINTS = frozenset({name.partition(" ")[2] for name in PATHS} | {name[1:] for name in METHODS})
OUTCOMES = REASONS | FINISHED | {CANCELLED, SEVERAL}
MODEL = ("model_name",)


class RequestLabels(NamedTuple):
    """One request's labels."""

    model: str
    tenant: str
    lane: str
    endpoint: str
    outcome: str
    result: str
    trace_id: int  # of a trace that is exported; 0: it is not


class LabelRules:
    """Turns what a request says of itself into labels. Tenants that the tenants file lists have labels of their own
    first."""

    def __init__(self, tenants: Tenants) -> None:
        self._models = BoundedNames(MAX_MODELS)
        self.tenants = BoundedNames(MAX_TENANTS, tenants.named)

    def of(self, record: RequestRecord) -> RequestLabels:
        """The labels of a request that has ended."""
        return RequestLabels(
            self._models.label(record.model),
            self.tenants.label(record.tenant),
            record.lane,
            record.endpoint if record.endpoint in ENDPOINTS else OTHER,
            SLOW_READER if record.fell_behind else outcome_label(record.outcome),
            result_of(record.outcome),
            record.trace_id if record.is_exported else 0,
        )


def outcome_label(outcome: str) -> str:
    """A known outcome."""
    if outcome in OUTCOMES:
        return outcome
    return SEVERAL if "," in outcome else OTHER


def reason_label(ended: str) -> str:
    """A known reason of the error table."""
    return ended if ended in REASONS else OTHER
