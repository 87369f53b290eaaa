"""Files that are generated, and parts of Markdown pages that are: the lines between two comments that name them."""

import sys
from pathlib import Path


def update(page: Path, name: str, text: str, command: str) -> None:
    """Replaces the part of the page between `<!-- begin: name -->` and `<!-- end: name -->`, as replace() does."""
    before, begin, rest = page.read_text().partition(f"<!-- begin: {name} -->\n")
    _, end, after = rest.partition(f"<!-- end: {name} -->")
    if not begin or not end:
        sys.exit(f"{page} has no part {name}")
    replace(page, f"{before}{begin}{text}{end}{after}", command)


def replace(file: Path, text: str, command: str) -> None:
    """Writes the file. With --check among the arguments it writes nothing, and exits with one line that names `command`
    if the file is out of date."""
    if "--check" not in sys.argv:
        file.write_text(text)
    elif file.read_text() != text:
        sys.exit(f"{file.name} is out of date: run {command}")
