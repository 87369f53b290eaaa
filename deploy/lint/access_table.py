"""Writes the tables of docs/access.md from what the router checks; --check only compares."""

from collections.abc import Mapping
from pathlib import Path

from deploy.lint.generated_part import update
from trunkline_router.identity.endpoints import (
    HEALTH_CHECK,
    HEALTH_WATCH,
    METHODS,
    PATHS,
    SHOW_CACHE,
    Needed,
    RoleUnlessOpen,
)
from trunkline_router.identity.identity import Role

PAGE = Path(__file__).parents[2] / "docs" / "access.md"
LIVENESS = "of the service `liveness`: open"
SEES_CACHE = "not for identities without `sees_cache`, nor for anonymous callers"


def table(what: str, needs: Mapping[str, Needed | None], notes: Mapping[str, str]) -> str:
    """A Markdown table with one row for each call."""
    rows = [f"| `{name}` | {_needed(needed)} | {notes.get(name, '')} |" for name, needed in needs.items()]
    return "\n".join([f"| {what} | needs | |", "|---|---|---|", *rows]) + "\n"


def _needed(needed: Needed | None) -> str:
    if needed is None:
        return "nothing: always open"
    if isinstance(needed, RoleUnlessOpen):
        return f"role `{needed.role}`, or `--open={needed.open}`"
    return f"role `{needed}`" if isinstance(needed, Role) else f"any identity, or `--open={needed}`"


def main() -> None:
    notes = dict.fromkeys((HEALTH_CHECK, HEALTH_WATCH), LIVENESS) | dict.fromkeys(SHOW_CACHE, SEES_CACHE)
    text = f"\n{table('RPC', METHODS, notes)}\n{table('HTTP', PATHS, {})}\n"
    update(PAGE, "access", text, "make access-table")


if __name__ == "__main__":
    main()
