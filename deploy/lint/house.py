"""Draws the rooms of each package, and which room imports which, into docs/architecture.md; --check only compares.

An arrow that follows from others is left out: where a → b → c is drawn, a → c is not.
"""

import ast
from pathlib import Path

from deploy.lint.generated_part import update

REPOSITORY = Path(__file__).parents[2]
PAGE = REPOSITORY / "docs" / "architecture.md"
PACKAGES = ("router/trunkline_router", "worker/trunkline_worker")

Arrows = dict[str, set[str]]  # room → rooms that it imports


def arrows(package: Path) -> Arrows:
    """Which rooms of a package import which. The modules beside the rooms are left out: they put the parts together."""
    rooms = {file.parent.name for file in package.glob("*/__init__.py")}
    found: Arrows = {room: set() for room in sorted(rooms)}
    for room in rooms:
        for file in (package / room).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(package.name + "."):
                    other = (node.module or "").split(".")[1]
                    if other in rooms and other != room:
                        found[room].add(other)
    return found


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
    for room in found:
        if room in reachable(found, room):
            raise SystemExit(f"{package.name}: {room} imports itself through other rooms")
    lines = [f"    {room} --> {other}" for room, others in reduced(found).items() for other in sorted(others)]
    alone = [
        f"    {room}" for room in found if not found[room] and not any(room in others for others in found.values())
    ]
    return "\n".join([f"`{package.name}`:\n", "```mermaid", "flowchart LR", *lines, *alone, "```\n"])


def main() -> None:
    text = "\n".join(drawing(REPOSITORY / package) for package in PACKAGES)
    update(PAGE, "rooms", f"\n{text}\n", "make house")


if __name__ == "__main__":
    main()
