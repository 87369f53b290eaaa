"""Writes the tables of docs/access.md from what the router checks; --check only compares."""

from collections.abc import Mapping
from pathlib import Path

from deploy.lint.generated_part import update
from trunkline_router.access.identity.needed_roles import (
    HEALTH_CHECK,
    HEALTH_WATCH,
    METHODS,
    PATHS,
    SHOW_CACHE,
    WATCHERS,
    Needed,
    Open,
    RoleUnlessOpen,
)

PAGE = Path(__file__).parents[2] / "docs" / "access.md"
LIVENESS = "of the service `liveness`: open"
OWN_PART = "users see their tenant's part ([the live page](page.md#rights))"
SEES_CACHE = "not for identities without `sees_cache`, nor for anonymous callers"


def table(what: str, needs: Mapping[str, Needed | None], notes: Mapping[str, str]) -> str:
    """A Markdown table with one row for each call."""
    rows = [f"| `{name}` | {_needed(needed)} | {notes.get(name, '')} |" for name, needed in needs.items()]
    return "\n".join([f"| {what} | needs | |", "|---|---|---|", *rows]) + "\n"


def _needed(needed: Needed | None) -> str:
    if needed is None:
        return "nothing: always open"
    if isinstance(needed, Open):
        return f"any identity, or `--open={needed}`"
    if isinstance(needed, RoleUnlessOpen):
        return f"role `{needed.role}`, or `--open={needed.open}`"
    if isinstance(needed, frozenset):
        return " or ".join(f"role `{role}`" for role in sorted(needed))
    return f"role `{needed}`"


def main() -> None:
    notes = dict.fromkeys((HEALTH_CHECK, HEALTH_WATCH), LIVENESS) | dict.fromkeys(SHOW_CACHE, SEES_CACHE)
    notes |= {name: OWN_PART for name, needed in {**METHODS, **PATHS}.items() if needed == WATCHERS}
    text = f"\n{table('RPC', METHODS, notes)}\n{table('HTTP', PATHS, notes)}\n"
    update(PAGE, "access", text, "make access-table")


if __name__ == "__main__":
    main()
