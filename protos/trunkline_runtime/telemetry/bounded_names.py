"""Label values that clients choose, such as tenants, bounded in number: every value is a time series for ever."""

from collections.abc import Iterable

OTHER = "other"


class BoundedNames:
    """The first `most` names have labels of their own, and before them `first`, as far as they fit; all later ones
    share one. A counter must not move from one label to another, so a name keeps what it got."""

    def __init__(self, most: int, first: Iterable[str] = ()) -> None:
        self._most = most
        self._names: dict[str, str] = {}
        for name in first:
            self.label(name)

    def label(self, name: str) -> str:
        """The label of a name."""
        label = self._names.get(name)
        if label is None:
            if len(self._names) >= self._most:
                return OTHER
            label = self._names[name] = name
        return label
