"""Counts by name with constant-time access to the largest."""


class Ranking:
    """Counts by name. Every operation takes constant time."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._names: dict[int, dict[str, None]] = {}  # by count
        self._most = 0

    def __getitem__(self, name: str) -> int:
        return self._counts.get(name, 0)

    def __len__(self) -> int:
        """Number of names with a count above zero."""
        return len(self._counts)

    def add(self, name: str) -> None:
        """Adds one to the name's count."""
        self._move(name, self[name] + 1)

    def remove(self, name: str) -> None:
        """Subtracts one from the name's count, which must be above zero."""
        self._move(name, self._counts[name] - 1)

    def first(self) -> str | None:
        """The name with the largest count, or None if all counts are zero. Among equals, the first to reach it."""
        return next(iter(self._names[self._most])) if self._counts else None

    def _move(self, name: str, count: int) -> None:
        before = self._counts.pop(name, 0)
        if before:
            names = self._names[before]
            del names[name]
            if not names:
                del self._names[before]
        if count:
            self._counts[name] = count
            self._names.setdefault(count, {})[name] = None
        if count > self._most or self._most not in self._names:
            self._most = count
