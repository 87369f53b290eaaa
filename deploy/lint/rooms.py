"""Draws the rooms of each package, and which room imports which, into docs/architecture.md; --check only compares.

An arrow that follows from others is left out: where a → b → c is drawn, a → c is not.
"""

import ast
from collections.abc import Container
from graphlib import TopologicalSorter
from pathlib import Path

from deploy.lint.generated_part import update

REPOSITORY = Path(__file__).parents[2]
PAGE = REPOSITORY / "docs" / "architecture.md"
PACKAGES = ("router/trunkline_router", "worker/trunkline_worker")

Arrows = dict[str, set[str]]  # room → rooms that it imports


def arrows(package: Path, *, inner: bool = False) -> Arrows:
    """Which rooms of a package import which. The modules beside the rooms are left out: they put the parts together.

    inner: of the rooms within rooms too, with dotted names; a room's own modules count apart from those
    Raises CycleError if a room imports itself through others.
    """
    folders = [file.parent.relative_to(package) for file in package.glob("*/**/__init__.py")]
    rooms = {".".join(folder.parts) for folder in folders if inner or len(folder.parts) == 1}
    found: Arrows = {room: set() for room in sorted(rooms)}
    for file in package.glob("*/**/*.py"):
        room = _room(".".join(file.relative_to(package).parts), rooms)
        for node in ast.walk(ast.parse(file.read_text())):
            if room and isinstance(node, ast.ImportFrom) and (node.module or "").startswith(package.name + "."):
                found[room].add(_room((node.module or "").removeprefix(package.name + "."), rooms))
    found = {room: others - {room, ""} for room, others in found.items()}
    TopologicalSorter(found).prepare()
    return found


def _room(name: str, rooms: Container[str]) -> str:
    """The innermost room that holds a module; "" if none does."""
    while name and name not in rooms:
        name = name.rpartition(".")[0]
    return name


def reachable(found: Arrows, room: str) -> set[str]:
    """All rooms that a room imports, directly or through others."""
    seen: set[str] = set()
    left = list(found[room])
    while left:
        other = left.pop()
        if other not in seen:
            seen.add(other)
            left.extend(found[other])
    return seen


def reduced(found: Arrows) -> Arrows:
    """The arrows without those that follow from others. There must be no cycle."""
    return {
        room: {other for other in direct if not any(other in reachable(found, via) for via in direct - {other})}
        for room, direct in found.items()
    }


def drawing(package: Path) -> str:
    """A Mermaid flow chart."""
    found = arrows(package)
    lines = [f"    {room} --> {' & '.join(sorted(others))}" for room, others in reduced(found).items() if others]
    alone = [
        f"    {room}" for room in found if not found[room] and not any(room in others for others in found.values())
    ]
    return "\n".join([f"`{package.name}`:\n", "```mermaid", "flowchart LR", *lines, *alone, "```\n"])


def main() -> None:
    text = "\n".join(drawing(REPOSITORY / package) for package in PACKAGES)
    update(PAGE, "rooms", f"\n{text}\n", "make rooms")


if __name__ == "__main__":
    main()
