"""Markdown tables and lists."""

from collections.abc import Sequence


def table(rows: dict[str, list[str]], columns: Sequence[str], corner: str = "") -> str:
    """A table. rows: cells by the name of their row; corner: heading of the first column."""
    lines = [f"| {corner} | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    lines += [f"| {name} | " + " | ".join(cells) + " |" for name, cells in rows.items()]
    return "\n".join(lines) + "\n"


def listed(items: dict[str, str]) -> str:
    """A list with one "name: value" a line."""
    return "".join(f"- {name}: {value}\n" for name, value in items.items())
