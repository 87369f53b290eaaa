"""The labels of one request, from a fixed number of values, whatever clients send."""

from typing import NamedTuple

from trunkline_router.record.request_record import CANCELLED, GRANTED, REASONS, RequestRecord, result_of
from trunkline_runtime.telemetry.bounded_names import OTHER, BoundedNames

MAX_MODELS = 32
MAX_TENANTS = 100  # with three lanes and three kinds of tokens: about 900 series
SEVERAL = "several"  # outcome: a request's choices ended differently
SLOW_READER = "SLOW_READER"  # outcome: OVERLOADED, because the client read too slowly

FINISHED = frozenset({"stop", "length", GRANTED})
OUTCOMES = REASONS | FINISHED | {CANCELLED, SEVERAL}


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
    """Turns what a request says of itself into labels.

    endpoints: the paths and RPCs that there are
    """

    def __init__(self, tenants: BoundedNames, endpoints: frozenset[str]) -> None:
        self._models = BoundedNames(MAX_MODELS)
        self.tenants = tenants
        self._endpoints = endpoints

    def of(self, record: RequestRecord) -> RequestLabels:
        """The labels of a request that has ended."""
        return RequestLabels(
            self.model(record.model),
            self.tenants.label(record.tenant),
            record.lane,
            record.endpoint if record.endpoint in self._endpoints else OTHER,
            SLOW_READER if record.fell_behind else outcome_label(record.outcome),
            result_of(record.outcome),
            record.trace_id if record.is_exported else 0,
        )

    def model(self, name: str) -> str:
        """The label of a model."""
        return self._models.label(name)


def outcome_label(outcome: str) -> str:
    """A known outcome."""
    if outcome in OUTCOMES:
        return outcome
    return SEVERAL if "," in outcome else OTHER


def reason_label(ended: str) -> str:
    """A known reason of the error table."""
    return ended if ended in REASONS else OTHER
