"""What docs/metrics.md says of the metrics that there are."""

import re
from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"


class Row(NamedTuple):
    """One metric.  rule: how values of several processes of routers become one; "" for workers"""

    name: str
    kind: str
    rule: str
    labels: tuple[str, ...]


def rows(part: str) -> list[Row]:
    """The metrics of routers ("router") or workers ("worker")."""
    text = PAGE.read_text().partition(f"<!-- begin: {part} -->")[2].partition("<!-- end:")[0]
    found = []
    for line in text.splitlines():
        if line.startswith("| `"):
            name, kind, *rule, labels, _ = line.removeprefix("| ").split(" | ", 4 if part == "router" else 3)
            found.append(Row(name.strip("`"), kind, "".join(rule), tuple(re.findall(r"`(\w+)`", labels))))
    return found


def documented(part: str) -> dict[str, str]:
    """Types by name, of routers ("router") or workers ("worker")."""
    return {row.name: row.kind for row in rows(part)}


def told(text: str) -> dict[str, str]:
    """The same, of an answer to a scraper."""
    return dict(line.split(" ")[2:4] for line in text.splitlines() if line.startswith("# TYPE "))
