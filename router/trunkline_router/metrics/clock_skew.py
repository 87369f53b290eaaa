"""How far a worker's clock is ahead of the router's. Pure."""

from trunkline_router.telemetry.request_record import AttemptRecord, RequestRecord

MOST_DOUBT_S = 1.0  # attempts that bound the difference less tightly say nothing
NANOSECONDS = 1e-9


def clock_skew_s(record: RequestRecord, attempt: AttemptRecord) -> float | None:
    """The worker's clock minus the router's; None if the attempt does not tell.

    The worker received the submit after the attempt began, and as long before its end as the choice lasted there. What
    its clock showed then is compared with the middle of the two.
    """
    if attempt.ended_s is None:
        return None
    began_unix_s = record.started_unix_ns * NANOSECONDS + (attempt.started_s - record.started_s)
    lasted_s = attempt.ended_s - attempt.started_s
    tightest: tuple[float, float] | None = None
    for timeline in attempt.timelines:
        doubt_s = lasted_s - timeline.ended_s  # that the submit and the end were under way
        if not timeline.HasField("received") or not 0.0 <= doubt_s <= MOST_DOUBT_S:
            continue
        received_unix_s = timeline.received.seconds + timeline.received.nanos * NANOSECONDS
        told = (doubt_s, received_unix_s - (began_unix_s + doubt_s / 2))
        tightest = told if tightest is None else min(tightest, told)
    return None if tightest is None else tightest[1]
