"""The other routers of the fleet, as they were heard last."""

from collections.abc import Mapping

from trunkline_router.credit import Credit, summed
from trunkline_router.shared_state.store import News, RouterNews, WorkerKey


class Neighbours:
    """See the module."""

    def __init__(self) -> None:
        self._said: dict[str, RouterNews] = {}
        self.competing: frozenset[str] = frozenset()  # tenants with open requests at any of them

    def __len__(self) -> int:
        return len(self._said)

    @property
    def versions(self) -> Mapping[str, int]:
        """Of what each has said."""
        return {name: said.version for name, said in self._said.items()}

    def hear(self, news: News) -> bool:
        """Whether anything is different now."""
        said = {name: before for name, before in self._said.items() if name in news.routers} | dict(news.changed)
        if not news.changed and len(said) == len(self._said):
            return False
        self._said = said
        self.competing = frozenset(tenant for other in said.values() for tenant in other.competing)
        return True

    def forget(self) -> None:
        self._said, self.competing = {}, frozenset()

    def credits(self) -> Mapping[WorkerKey, Credit]:
        """What they have sent where, together."""
        return summed(other.credits for other in self._said.values())
