"""docs/security.md: each line of a threat names the tests that prove it, and they run."""

from pathlib import Path

import pytest

from tests.deploy.proofs import NAMED, problems, proofs_in

TESTS = Path(__file__).parents[1]
THREATS = (TESTS.parent / "docs" / "security.md").read_text().split("## Threats")[1].split("## Known gaps")[0]
ROWS = [line for line in THREATS.splitlines() if line.startswith("| ") and not line.startswith("| threat ")]


def test_each_threat_has_a_defence_and_a_test() -> None:
    assert len(ROWS) > 40
    for row in ROWS:
        threat, defence, tests = (cell.strip() for cell in row.strip("|").split("|"))
        assert threat
        assert defence
        assert NAMED.sub("", tests).strip(", ") == "", f"{threat}: {tests}"
        assert NAMED.search(tests), threat


def test_the_named_tests_exist_and_run_unless_the_page_says_that_they_are_slow() -> None:
    assert problems([proof for row in ROWS for proof in proofs_in(row)], TESTS) == []


SAMPLE = """
import pytest

from proofs.elsewhere import AWAY

LATE = pytest.mark.slow

def test_plain(tmp_path): ...

@pytest.mark.slow
def test_slow(): ...

@LATE
def test_slow_by_a_name(): ...

@pytest.mark.parametrize("word", [pytest.param("a", marks=pytest.mark.slow), "b"])
def test_half_slow(word): ...

@pytest.mark.parametrize("word", [pytest.param("a", marks=LATE), pytest.param("b", marks=[pytest.mark.slow])])
def test_all_slow(word): ...

@pytest.mark.skip
def test_skipped(): ...

@AWAY
def test_skipped_by_an_imported_mark(): ...

def test_skips_itself():
    pytest.skip("never")

@pytest.fixture
def asks(needs_a_folder): ...

def test_skipped_by_a_fixture(asks): ...
"""
CONFTEST = """
import pytest

def pytest_configure(config):
    config.addinivalue_line("markers", "slow: takes minutes")

@pytest.fixture
def needs_a_folder():
    pytest.skip("there is none")
"""
SKIPPED, IS_SLOW, RUNS = "it may be skipped", "is a slow test", "runs with the others"


@pytest.fixture
def sample(tmp_path: Path) -> Path:
    root = tmp_path / "proofs"
    (root / "room").mkdir(parents=True)
    for name, text in (
        ("conftest.py", CONFTEST),
        ("elsewhere.py", "import pytest\nAWAY = pytest.mark.skipif(False, reason='')\n"),
        ("room/test_sample.py", SAMPLE),
        ("room/test_late.py", "import pytest\npytestmark = [pytest.mark.slow]\ndef test_plain(): ...\n"),
    ):
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("named", "problem"),
    [
        ("test_sample.py::test_plain`", ""),
        ("test_sample.py::test_plain` (slow)", RUNS),
        ("test_sample.py::test_absent`", "there is no such test"),
        ("test_none.py::test_plain`", "there is no such test"),
        ("test_sample.py::asks`", "there is no such test"),
        ("test_sample.py::test_slow`", IS_SLOW),
        ("test_sample.py::test_slow` (slow)", ""),
        ("test_sample.py::test_slow_by_a_name`", IS_SLOW),
        ("test_late.py::test_plain`", IS_SLOW),
        ("test_sample.py::test_half_slow`", ""),
        ("test_sample.py::test_all_slow`", IS_SLOW),
        ("test_sample.py::test_skipped`", SKIPPED),
        ("test_sample.py::test_skipped_by_an_imported_mark`", SKIPPED),
        ("test_sample.py::test_skips_itself`", SKIPPED),
        ("test_sample.py::test_skipped_by_a_fixture`", SKIPPED),
    ],
)
def test_a_proof_that_is_not_what_the_page_says_is_found(sample: Path, named: str, problem: str) -> None:
    (proof,) = proofs_in(f"`room/{named}")
    assert problems([proof], sample) == ([f"{proof.name}: {problem}"] if problem else [])


def test_a_case_that_is_not_what_the_page_says_is_found(sample: Path) -> None:
    right = "`room/test_sample.py::test_half_slow[b]`, `room/test_sample.py::test_half_slow[a]` (slow)"
    wrong = "`room/test_sample.py::test_half_slow[a]`, `room/test_sample.py::test_half_slow[c]`"
    assert problems(proofs_in(right + wrong), sample) == [
        f"room/test_sample.py::test_half_slow[a]: {IS_SLOW}",
        "room/test_sample.py::test_half_slow[c]: there is no such case",
    ]
