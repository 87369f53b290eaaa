"""`canitoolcall probe` against running clusters: all of its 27 checks."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from canitoolcall.probe import BUILTIN_SCENARIOS, probe

from tests.clients.edge import running_edge
from tests.playing.families import FAMILIES, Family
from tests.playing.worker import COMMAND

# What the model says in each scenario: calls, or text.
SAID: Mapping[str, str | list[tuple[str, Mapping[str, Any]]]] = {
    "single-call": [("get_weather", {"city": "Paris", "unit": "c"})],
    "parallel-calls": [("get_weather", {"city": "Paris"}), ("get_weather", {"city": "Tokyo"})],
    "no-call": "42",
    "nested-args": [
        (
            "create_event",
            {
                "title": "Design review",
                "start": "2026-10-01T15:00:00Z",
                "attendees": [
                    {"name": "Ana", "email": "ana@example.com"},
                    {"name": "Bo", "email": "bo@example.com"},
                ],
                "location": {"city": "Berlin", "room": "4.12"},
            },
        )
    ],
    "unicode-args": [("save_note", {"title": "Grüße aus Zürich", "body": "Café ☕ in 東京 — naïve résumé 🚀"})],
    "empty-args": [("get_server_time", {})],
    "tool-result-followup": "It is 18 °C and clear.",
    "reasoning-then-call": [("record_answer", {"answer": "9.9"})],
    "forced-tool-choice": [("get_weather", {"city": "Lisbon"})],
}


def answers(family: Family) -> dict[str, str]:
    """What models of a family say to the last message of each scenario."""
    last = {scenario.id: str(scenario.messages[-1]["content"]) for scenario in BUILTIN_SCENARIOS}
    assert {*SAID} == {*last}
    written = {}
    for name, said in SAID.items():
        thought = family.thought("9.9 is 9.90.") if name == "reasoning-then-call" else ""
        calls = "" if isinstance(said, str) else "".join(family.call(*call) for call in said)
        # What must be a call is one from its beginning.
        calls = calls.lstrip() if name == "forced-tool-choice" else calls
        written[last[name]] = thought + (family.text(said) if isinstance(said, str) else calls)
    return written


@pytest.mark.slow  # a cluster for each family
@pytest.mark.parametrize("answer_format", ["hermes", "mistral", "harmony"])
def test_all_checks_pass(answer_format: str, tmp_path: Path) -> None:
    family = FAMILIES[answer_format]
    asked = [
        scenario
        for scenario in BUILTIN_SCENARIOS
        if scenario.id != "parallel-calls" or answer_format != "harmony"  # <|call|> ends an answer of gpt-oss
    ]
    with running_edge(family.write(tmp_path / "player", answers(family)), command=COMMAND) as edge:
        report = probe(edge.url, edge.model, scenarios=asked)
    assert len(report.outcomes) == 3 * len(asked)
    assert all(one.status == "pass" and not one.warnings for one in report.outcomes), report.render_text()
    [whole, streamed] = [o.observed for o in report.outcomes if o.scenario_id == "reasoning-then-call" and o.observed]
    assert whole.reasoning_content == streamed.reasoning_content == "9.9 is 9.90."
