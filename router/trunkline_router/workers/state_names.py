"""The state of a worker in one word, as this router sees it."""

from trunkline_router.workers.worker_link import WorkerLink

CONNECTING, READY, DRAINING, HUNG, BROKEN, ASIDE = "connecting", "ready", "draining", "hung", "broken", "aside"
STATES = (CONNECTING, READY, DRAINING, HUNG, BROKEN, ASIDE)


def state_of(link: WorkerLink) -> str:
    """Returns the worker's state.

    BROKEN: requests failed there recently
    ASIDE: it differs from the other workers of its pool
    """
    worker = link.worker
    if worker is None:
        return CONNECTING
    if worker.is_hung:
        return HUNG
    if worker.load.draining:
        return DRAINING
    if worker.aside:
        return ASIDE
    return READY if link.breaker.is_closed else BROKEN
