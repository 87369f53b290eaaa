"""Turns for what waits: hosts take turns, a host's connections among themselves, a connection's tenants likewise."""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

from trunkline_router.gate.sender import Sender

Item = TypeVar("Item")
Path = tuple[str, ...]  # a sender's host; with its connection; with its tenant


class Rotation(Generic[Item]):
    """What waits, by its sender."""

    def __init__(self) -> None:
        self._root: _Branch[Item] = _Branch()

    def __bool__(self) -> bool:
        return bool(self._root.branches)

    def __contains__(self, sender: Sender) -> bool:
        return self._root.at(sender) is not None

    def add(self, sender: Sender, item: Item) -> None:
        """Behind the sender's others."""
        self._root.add(sender, item)

    def remove(self, sender: Sender, item: Item) -> None:
        """Does nothing where it does not wait."""
        self._root.remove(sender, item)

    def pop(self, may_go: Callable[[Path], bool]) -> tuple[Sender, Item] | None:
        """Takes out whose turn it is; None: nothing may go. `may_go` says so of a host, of a connection, and of a
        tenant on a connection."""
        found = self._root.pop((), may_go)
        return None if found is None else (Sender(*found[0]), found[1])

    def senders(self) -> Iterator[Sender]:
        """All that wait, one after the other as turns would go."""
        return (Sender(*names) for names in self._root.paths(()))


class _Branch(Generic[Item]):
    """All that waits of a host, a connection or a tenant; the next one's turn first."""

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
