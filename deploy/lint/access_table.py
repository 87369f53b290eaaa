"""Writes the tables of docs/access.md from what the router checks; --check only compares."""

from collections.abc import Mapping
from pathlib import Path

from deploy.lint.generated_part import update
from trunkline_router.access.identity.needed_roles import (
    HEALTH_CHECK,
    HEALTH_WATCH,
    METHODS,
    PATHS,
    WATCHERS,
    Needed,
)

PAGE = Path(__file__).parents[2] / "docs" / "access.md"
LIVENESS = "of the service `liveness`: open"
OWN_PART = "users see their tenant's part ([the live page](page.md#rights))"
SEES_CACHE = "not for identities without `sees_cache`, nor for anonymous callers"


def table(what: str, needs: Mapping[str, Needed]) -> str:
    """A Markdown table with one row for each call."""
    rows = [f"| `{name}` | {_words(needed)} | {_note(name, needed)} |" for name, needed in needs.items()]
    return "\n".join([f"| {what} | needs | |", "|---|---|---|", *rows]) + "\n"


def _words(needed: Needed) -> str:
    if needed.is_open:
        return "nothing: always open"
    roles = " or ".join(f"role `{role}`" for role in sorted(needed.roles)) or "any identity"
    return roles if needed.open is None else f"{roles}, or `--open={needed.open}`"


def _note(name: str, needed: Needed) -> str:
    if name in (HEALTH_CHECK, HEALTH_WATCH):
        return LIVENESS
    return SEES_CACHE if needed.shows_cache else OWN_PART if needed.roles == WATCHERS else ""


def main() -> None:
    text = f"\n{table('RPC', METHODS)}\n{table('HTTP', PATHS)}\n"
    update(PAGE, "access", text, "make access-table")


if __name__ == "__main__":
    main()
