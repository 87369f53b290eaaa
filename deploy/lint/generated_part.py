"""A part of a Markdown page that is generated: the lines between two comments that name it."""

import sys
from pathlib import Path


def update(page: Path, name: str, text: str, command: str) -> None:
    """Replaces the part of the page between `<!-- begin: name -->` and `<!-- end: name -->`. With --check among the
    arguments it writes nothing, and exits with one line that names `command` if the part is out of date."""
    before, begin, rest = page.read_text().partition(f"<!-- begin: {name} -->\n")
    _, end, after = rest.partition(f"<!-- end: {name} -->")
    if not begin or not end:
        sys.exit(f"{page} has no part {name}")
    wanted = f"{before}{begin}{text}{end}{after}"
    if "--check" not in sys.argv:
        page.write_text(wanted)
    elif page.read_text() != wanted:
        sys.exit(f"{page.name}: the part {name} is out of date: run {command}")
