"""docs/security.md: each line of a threat names the tests that prove it, and they exist."""

import ast
import re
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parents[1]
THREATS = (TESTS.parent / "docs" / "security.md").read_text().split("## Threats")[1].split("## Known gaps")[0]
ROWS = [line for line in THREATS.splitlines() if line.startswith("| ") and not line.startswith("| threat ")]
NAMED = re.compile(r"`([a-z_/0-9]+\.py)::(\w+)`")


@cache
def found_in(file: str) -> frozenset[str]:
    """The tests that pytest finds in a file."""
    path = TESTS / file
    tree = ast.parse(path.read_text()) if path.exists() else ast.Module([], [])
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return frozenset(function.name for function in functions if function.name.startswith("test_"))


def test_each_threat_has_a_defence_and_a_test() -> None:
    assert len(ROWS) > 40
    for row in ROWS:
        threat, defence, tests = (cell.strip() for cell in row.strip("|").split("|"))
        assert threat
        assert defence
        assert NAMED.sub("", tests).strip(", ") == "", f"{threat}: {tests}"
        assert NAMED.search(tests), threat


def test_the_named_tests_exist() -> None:
    named = [match.groups() for row in ROWS for match in NAMED.finditer(row)]
    assert [f"{file}::{test}" for file, test in named if test not in found_in(file)] == []
