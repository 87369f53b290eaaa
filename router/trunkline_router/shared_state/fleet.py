"""What the shared state asks its router, and tells it. There is one, PoolFleet (pool_fleet.py); tests have another."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from trunkline_router.routing.credit import Credit
from trunkline_router.stores.store import Lease, WorkerKey


class Fleet(Protocol):
    """The router's side of what is shared."""

    def credits(self) -> Mapping[WorkerKey, Credit]:
        """What this router has sent where."""
        ...

    def leases(self) -> Sequence[Lease]:
        """The workers that it is connected to, and was told of other than by leases."""
        ...

    def take_credits(self, others: Mapping[WorkerKey, Credit]) -> None:
        """What all other routers have sent where; workers that are not named got nothing."""
        ...

    def take_leases(self, leases: Sequence[Lease]) -> None:
        """The workers that any router is connected to."""
        ...
