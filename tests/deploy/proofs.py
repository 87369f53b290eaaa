"""Tests that a page names as proofs: whether they exist, and whether they run with the others.

What holds for a whole test is read from its source, because importing all the named files takes half a minute. Cases
of a parametrised test are what pytest finds itself.
"""

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

NAMED = re.compile(r"`([a-z_/0-9]+\.py)::(\w+)(?:\[([^`]*)\])?`( \(slow\))?")
SKIPS = frozenset({"skip", "skipif", "xfail", "importorskip"})
SLOW = "slow"

# Prints the marks of each test that pytest finds, as JSON by node id.
_COLLECT = """
import json, sys, pytest
class Found:
    def pytest_collection_finish(self, session):
        marks = {item.nodeid: [mark.name for mark in item.iter_markers()] for item in session.items}
        print("FOUND " + json.dumps(marks))
own = ["-p", "no:cacheprovider", "-p", "pytest_asyncio.plugin", "-p", "pytest_timeout"]
pytest.main(["--collect-only", "-q", *own, *sys.argv[1:]], plugins=[Found()])
"""


@dataclass(frozen=True, slots=True)
class Proof:
    """A test as a page names it: `file.py::test`, `file.py::test[case]`, or one of these with " (slow)" after it."""

    file: str
    test: str
    case: str = ""
    is_called_slow: bool = False

    @property
    def name(self) -> str:
        return f"{self.file}::{self.test}" + (f"[{self.case}]" if self.case else "")


def proofs_in(text: str) -> list[Proof]:
    """The tests that a text names."""
    return [Proof(file, test, case or "", bool(slow)) for file, test, case, slow in NAMED.findall(text)]


def problems(proofs: Sequence[Proof], root: Path) -> list[str]:
    """What is wrong with the proofs, one line each.  root: the folder that the files' names begin in"""
    found = collected(root, sorted({proof.file for proof in proofs if proof.case}))
    said = []
    for proof in proofs:
        source = _source(root, proof.file)
        if source is None or source.test(proof.test) is None:
            said.append(f"{proof.name}: there is no such test")
            continue
        marks = source.marks(proof.test)
        if proof.case:
            if proof.name not in found:
                said.append(f"{proof.name}: there is no such case")
                continue
            marks = marks | found[proof.name]
        if marks & SKIPS:
            said.append(f"{proof.name}: it may be skipped")
        if (SLOW in marks) != proof.is_called_slow:
            said.append(f"{proof.name}: " + ("runs with the others" if proof.is_called_slow else "is a slow test"))
    return said


def collected(root: Path, files: Sequence[str]) -> dict[str, frozenset[str]]:
    """The marks of each test that pytest finds in these files, by "file::test[case]"."""
    if not files:
        return {}
    command = [sys.executable, "-c", _COLLECT, *(str(root / file) for file in files)]
    # Other plugins that are installed cost seconds and find no more tests.
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        command, cwd=root.parent, env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")] or [""]
    assert line, f"{done.stdout}{done.stderr}"
    marks: dict[str, list[str]] = json.loads(line.removeprefix("FOUND "))
    return {name.removeprefix(f"{root.name}/"): frozenset(names) for name, names in marks.items()}


class Source:
    """A file of tests, or of fixtures, as written."""

    def __init__(self, path: Path, root: Path) -> None:
        self._path, self._root = path, root
        self._tree = ast.parse(path.read_text())
        self._assigned = {
            target.id: node.value
            for node in self._tree.body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        self._functions = {
            node.name: node for node in self._tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        }

    def test(self, name: str) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
        """The test of this name; None if there is none at the file's top level."""
        return self._functions.get(name) if name.startswith("test_") else None

    def marks(self, name: str) -> frozenset[str]:
        """The marks of a test, and the names in SKIPS that it or a fixture of it calls. Marks of its cases count if all
        the cases have them."""
        function = self._functions[name]
        found = set(self._marks_of(self._assigned.get("pytestmark")))
        for decorator in function.decorator_list:
            found |= set(self._marks_of(decorator)) | self._marks_of_all_cases(decorator)
        return frozenset(found | self._skips(function, frozenset()))

    def _marks_of(self, expression: ast.expr | None) -> Iterator[str]:
        """The names of the pytest.mark.NAME in an expression, also behind names of this file or of another one."""
        match expression:
            case ast.Call(func=function):
                yield from self._marks_of(function)
            case ast.List(elts=items) | ast.Tuple(elts=items):
                for item in items:
                    yield from self._marks_of(item)
            case ast.Attribute(value=ast.Attribute(attr="mark"), attr=name):
                yield name
            case ast.Name(id=name) if name in self._assigned:
                yield from self._marks_of(self._assigned[name])
            case ast.Name(id=name) if (other := self._imported(name)) is not None:
                yield from other[0]._marks_of(ast.Name(other[1]))

    def _imported(self, name: str) -> "tuple[Source, str] | None":
        """Where an imported name comes from, and its name there; None if that is not a file of tests."""
        for node in self._tree.body:
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{self._root.name}."):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        file = "/".join((node.module or "").split(".")[1:]) + ".py"
                        source = _source(self._root, file)
                        return None if source is None else (source, alias.name)
        return None

    def _marks_of_all_cases(self, decorator: ast.expr) -> set[str]:
        match decorator:
            case ast.Call(func=ast.Attribute(attr="parametrize"), args=[_, ast.List(elts=[_, *_] as cases), *_]):
                return set.intersection(*(self._marks_of_case(case) for case in cases))
        return set()

    def _marks_of_case(self, case: ast.expr) -> set[str]:
        keywords = case.keywords if isinstance(case, ast.Call) else []
        return {mark for word in keywords if word.arg == "marks" for mark in self._marks_of(word.value)}

    def _skips(self, function: ast.FunctionDef | ast.AsyncFunctionDef, seen: frozenset[str]) -> set[str]:
        """The names in SKIPS that a function or a fixture of it calls."""
        found = {
            node.func.attr
            for node in ast.walk(function)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in SKIPS
        }
        for argument in (*function.args.args, *function.args.kwonlyargs):
            for source in self._with_conftests() if argument.arg not in seen else ():
                if (fixture := source._functions.get(argument.arg)) is not None:
                    found |= source._skips(fixture, seen | {argument.arg})
                    break
        return found

    def _with_conftests(self) -> Iterable["Source"]:
        """This file, and the conftest.py of its folder and of those around it."""
        yield self
        for folder in self._path.parents:
            source = _source(self._root, str((folder / "conftest.py").relative_to(self._root)))
            if source is not None and source is not self:
                yield source
            if folder == self._root:
                return


@cache
def _source(root: Path, file: str) -> Source | None:
    path = root / file
    return Source(path, root) if path.is_file() else None
