"""The shared state's interface to its router, implemented by PoolFleet (pool_fleet.py) and by fakes in tests."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from trunkline_router.quotas.stores.store import Lease, WorkerKey
from trunkline_router.routing.credit import Credit


class Fleet(Protocol):
    """The workers of a router, as the shared state sees them."""

    def credits(self) -> Mapping[WorkerKey, Credit]:
        """Returns what this router has sent to each worker."""
        ...

    def leases(self) -> Sequence[Lease]:
        """Returns the connected workers that the router knows from other sources than leases."""
        ...

    def take_credits(self, others: Mapping[WorkerKey, Credit]) -> None:
        """Takes what all other routers have sent to each worker; a worker that is missing was sent nothing."""
        ...

    def take_leases(self, leases: Sequence[Lease]) -> None:
        """Takes the workers that any router is connected to."""
        ...
