"""A request of which watchers are told: its record, and what the router weighed for it."""

from collections.abc import Sequence

from trunkline_router.record.request_record import MOST_CANDIDATES, RequestRecord
from trunkline_router.record.ttft_parts import Part, cause_of, ttft_parts
from trunkline_router.routing.policy import Candidate, RoutePlan


class ToldRequest:
    """Keeps the plans of a record, which drops them once its listeners were told. Candidates and parts are worked out
    by the first look: most requests are never looked at.

    now_s: for a request that still runs; None: it has ended
    """

    __slots__ = ("_candidates", "_cause", "_now_s", "_plans", "num_rows", "record")

    def __init__(self, record: RequestRecord, now_s: float | None = None) -> None:
        self.record = record
        self._now_s = now_s
        self.num_rows = sum(placement.num_workers for placement in record.placements)  # what the plans' size depends on
        self._plans: Sequence[RoutePlan | None] = [placement.plan for placement in record.placements]
        self._candidates: dict[int, Sequence[Candidate]] = {}  # by place among the placements
        self._cause: str | None = None

    def forget_plans(self) -> None:
        """Keeps the decisions, but not what they were made from."""
        self._plans, self.num_rows = (), 0

    def candidates(self, place: int) -> Sequence[Candidate]:
        """Returns the chosen worker of a placement, then the next best; none if they are forgotten."""
        if place not in self._candidates:
            plan = self._plans[place] if place < len(self._plans) else None
            self._candidates[place] = () if plan is None else plan.best(MOST_CANDIDATES)
        return self._candidates[place]

    @property
    def is_running(self) -> bool:
        return self._now_s is not None

    @property
    def end_s(self) -> float:
        """When it ended, or now."""
        return self._now_s or self.record.ended_s or self.record.started_s

    def parts(self) -> list[Part]:
        """Returns where the time to first token went."""
        return ttft_parts(self.record, self.end_s)

    @property
    def cause(self) -> str:
        """The kind of part that took the most of it, "" if none took long."""
        if self._cause is None:
            self._cause = cause_of(self.record, self.end_s)
        return self._cause
