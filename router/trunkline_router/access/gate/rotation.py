"""A round-robin queue with three levels: hosts, the connections of a host, and the tenants of a connection."""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

from trunkline_router.access.gate.sender import Sender

Item = TypeVar("Item")
Path = tuple[str, ...]  # (host,), (host, connection) or (host, connection, tenant)


class Rotation(Generic[Item]):
    """Items that wait for their turn, by sender."""

    def __init__(self) -> None:
        self._root: _Branch[Item] = _Branch()

    def __bool__(self) -> bool:
        return bool(self._root.branches)

    def __contains__(self, sender: Sender) -> bool:
        return self._root.at(sender) is not None

    def add(self, sender: Sender, item: Item) -> None:
        """Appends the item to the sender's queue."""
        self._root.add(sender, item)

    def remove(self, sender: Sender, item: Item) -> None:
        """Removes the item. Does nothing if it is not queued."""
        self._root.remove(sender, item)

    def pop(self, may_go: Callable[[Path], bool]) -> tuple[Sender, Item] | None:
        """Removes and returns the next item and its sender, or None if no item may go. `may_go` decides for a host, a
        connection, or a tenant on a connection."""
        found = self._root.pop((), may_go)
        return None if found is None else (Sender(*found[0]), found[1])

    def senders(self) -> Iterator[Sender]:
        """All waiting senders in the order of their turns."""
        return (Sender(*names) for names in self._root.paths(()))


class _Branch(Generic[Item]):
    """All queued items of a host, a connection or a tenant, with the next branch first."""

    def __init__(self) -> None:
        self.branches: OrderedDict[str, _Branch[Item]] = OrderedDict()
        self.items: OrderedDict[Item, None] = OrderedDict()

    def at(self, names: Sequence[str]) -> "_Branch[Item] | None":
        branch: _Branch[Item] | None = self
        for name in names:
            branch = None if branch is None else branch.branches.get(name)
        return branch

    def add(self, names: Sequence[str], item: Item) -> None:
        branch = self
        for name in names:
            branch = branch.branches.setdefault(name, _Branch())
        branch.items[item] = None

    def remove(self, names: Sequence[str], item: Item) -> None:
        if not names:
            self.items.pop(item, None)
        elif (branch := self.branches.get(names[0])) is not None:
            branch.remove(names[1:], item)
            if branch.is_empty:
                del self.branches[names[0]]

    @property
    def is_empty(self) -> bool:
        return not self.items and not self.branches

    def pop(self, names: Path, may_go: Callable[[Path], bool]) -> tuple[Path, Item] | None:
        if len(names) == len(Sender._fields):
            return names, self.items.popitem(last=False)[0]
        for name, branch in self.branches.items():
            path = (*names, name)
            if not may_go(path):
                continue
            if (found := branch.pop(path, may_go)) is not None:
                del self.branches[name]
                if not branch.is_empty:
                    self.branches[name] = branch  # behind the others
                return found
        return None

    def paths(self, names: Path) -> Iterator[Path]:
        if len(names) == len(Sender._fields):
            yield names
        turns = deque(branch.paths((*names, name)) for name, branch in self.branches.items())
        while turns:
            turn = turns.popleft()
            if (found := next(turn, None)) is not None:
                yield found
                turns.append(turn)
