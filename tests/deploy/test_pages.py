"""The pages: links lead somewhere, generated parts can be made, and the lint for words finds what it is for."""

import re
import subprocess
from pathlib import Path

import pytest

from deploy.lint import plain_words
from deploy.lint.rooms import reachable, reduced
from trunkline_router.access.identity.identity import Role
from trunkline_router.access.identity.needed_roles import METHODS, PATHS

REPOSITORY = Path(__file__).parents[2]
PAGES = [*sorted(REPOSITORY.glob("*.md")), *sorted((REPOSITORY / "docs").glob("*.md")), REPOSITORY / "bench" / "log.md"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_and_every_named_module_of_a_page_exists(page: Path) -> None:
    text = page.read_text()
    links = [link.split("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    assert [link for link in links if link and not (page.parent / link).exists()] == []
    if page.name != "log.md":  # the log is history
        modules = set(re.findall(r"`((?:[a-z_]+/)*[a-z_]+\.(?:py|proto))`", text))
        present = [f"/{file}" for file in _files()]
        assert [module for module in modules if not any(file.endswith(f"/{module}") for file in present)] == []


def _files() -> list[str]:
    listed = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, check=True, capture_output=True, text=True)
    return listed.stdout.splitlines()


def test_the_pages_promise_nothing_to_a_role_that_no_call_needs() -> None:
    access, configuration = ((REPOSITORY / "docs" / f"{page}.md").read_text() for page in ("access", "configuration"))
    needed = {role for needs in (*METHODS.values(), *PATHS.values()) for role in needs.roles}
    for role in Role:
        assert (f"No call needs the role `{role}` yet" in access) == (role not in needed)
        assert (f"`{role}`: reserved" in configuration) == (role not in needed)
        assert f"`{role}`" in configuration


def test_the_first_page_is_read_to_its_end() -> None:
    assert len((REPOSITORY / "README.md").read_text().splitlines()) <= 120


def test_an_arrow_that_follows_from_others_is_not_drawn() -> None:
    arrows = {"api": {"routing", "workers"}, "workers": {"routing"}, "routing": set[str]()}
    assert reduced(arrows) == {"api": {"workers"}, "workers": {"routing"}, "routing": set()}
    assert reachable(arrows, "api") == {"routing", "workers"}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("# Nobody waits.", ["Nobody"]),
        ("whoever asks, and those who wait", ["whoever", "who"]),
        ("It ends. Who names no tenant has none.", ["Who"]),
        ("Tenants who share a group", ["who"]),
        ("A tenant whose group is shared", []),
        ("no_body, the_nobody_flag", []),
    ],
)
def test_words_that_hide_their_subject_are_found(line: str, words: list[str]) -> None:
    assert [word for _, word in plain_words.findings(line)] == words
