"""What docs/metrics.md says of the metrics that there are."""

from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"


def documented(part: str) -> dict[str, str]:
    """Types by name, of routers ("router") or workers ("worker")."""
    text = PAGE.read_text().partition(f"<!-- begin: {part} -->")[2].partition("<!-- end:")[0]
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| `")]
    return {name.removeprefix("| ").strip("`"): kind for name, kind, *_ in rows}


def told(text: str) -> dict[str, str]:
    """The same, of an answer to a scraper."""
    return dict(line.split(" ")[2:4] for line in text.splitlines() if line.startswith("# TYPE "))
