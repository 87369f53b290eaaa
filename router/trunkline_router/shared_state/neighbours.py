"""The other routers of the fleet, as they were heard last."""

from collections.abc import Mapping

from trunkline_router.credit import Credit, summed
from trunkline_router.shared_state.store import News, RouterNews, WorkerKey


class Neighbours:
    """See the module."""

    def __init__(self) -> None:
        self._alive: frozenset[str] = frozenset()
        self._said: dict[str, RouterNews] = {}
        self.competing: frozenset[str] = frozenset()  # tenants with open requests at any of them

    def __len__(self) -> int:
        return len(self._alive)

    @property
    def versions(self) -> Mapping[str, int]:
        """Of what each has said."""
        return {name: said.version for name, said in self._said.items()}

    def hear(self, news: News) -> bool:
        """Whether what they have said is different now."""
        self._alive = frozenset(news.routers)
        said = {name: before for name, before in self._said.items() if name in self._alive} | dict(news.changed)
        if not news.changed and len(said) == len(self._said):
            return False
        self._said = said
        self.competing = frozenset(tenant for other in said.values() for tenant in other.competing)
        return True

    def forget(self) -> None:
        self._alive, self._said, self.competing = frozenset(), {}, frozenset()

    def credits(self) -> Mapping[WorkerKey, Credit]:
        """What they have sent where, together."""
        return summed(other.credits for other in self._said.values())
