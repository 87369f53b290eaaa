"""`make bench-routing`: times of a decision, by part and for a whole request."""

import re
import sys
from pathlib import Path

import pytest

from trunkline_bench.router import routing


def test_a_decision_is_timed_by_part_and_for_a_whole_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(routing, "DECISIONS", 30)
    monkeypatch.setattr(routing, "PROMPTS", (100,))
    monkeypatch.setattr(routing, "FLEETS", (3, 60))
    monkeypatch.setattr(sys, "argv", ["routing", "--blocks", "5000", "--output", str(tmp_path)])
    routing.main()
    (report,) = tmp_path.glob("routing-*.md")
    text = report.read_text()
    assert text in capsys.readouterr().out
    assert "- command: `make bench-routing ARGS='--blocks 5000'`" in text
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| 100 tokens")]
    assert [len(row) for row in rows] == [7, 7]
    for row in rows:
        assert all(re.fullmatch(r"[\d,]+ / [\d,]+", cell) for cell in row[1:6])
        assert row[6] == "30 |"
