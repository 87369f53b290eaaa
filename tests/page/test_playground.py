"""What a model thinks and which tools it calls, as the playground shows it."""

import json
from collections.abc import Iterator

import pytest

from tests.clients.edge import Edge, running_edge
from tests.page.browser import Browser
from tests.playing.families import HERMES
from tests.playing.worker import COMMAND

CALL, LONG_CALL = "What is the weather in Paris?", "What is the weather everywhere?"
THOUGHT, TEXT = "I <b>have</b> to look it up.", "One moment."
PLACES = " ".join(f"place {number}" for number in range(200))
ANSWERS = {
    CALL: HERMES.thought(THOUGHT) + TEXT + HERMES.call("get_weather", {"city": "<i>Paris", "id": 12345678901234567890}),
    LONG_CALL: HERMES.call("get_weather", {"city": PLACES}),
}
TOOLS = json.dumps([{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}])


@pytest.fixture(scope="module")
def player(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Edge]:
    """Needs the browser, so that nothing is started where there is none."""
    model = HERMES.write(tmp_path_factory.mktemp("player"), ANSWERS)
    with running_edge(model, command=COMMAND) as running:
        yield running


@pytest.mark.slow
@pytest.mark.parametrize("look", ["light", "dark"])
def test_reasoning_is_folded_calls_are_shown_and_one_that_was_cut_off_is_marked(
    page: Browser, player: Edge, look: str
) -> None:
    page.open(f"{player.root}/", colorScheme=look)
    page.wait("#freshness", "Live")
    page.wait("#play-model", player.model)
    page.fill("#play-tools", "[{")
    page.fill("#play-prompt", CALL)
    page.click("#play-send")
    assert "This is not JSON" in page.value("return document.activeElement.validationMessage")
    assert page.value("return document.activeElement.id") == "play-tools"
    assert page.text("#play-facts") == ""
    page.fill("#play-tools", TOOLS)
    page.click("#play-send")
    page.wait("#play-facts", r"ended \(tool_calls\) · first token")
    assert page.text("#play-answer figcaption") == "Calls get_weather"
    assert page.text("#play-answer pre") == '{\n  "city": "<i>Paris",\n  "id": 12345678901234567890\n}'
    assert TEXT in page.text("#play-answer")
    assert THOUGHT not in page.text("#play-answer")
    page.focus("#play-answer summary")
    page.press("Enter")
    assert THOUGHT in page.text("#play-answer")
    assert page.violations() == []
    page.fill("#play-prompt", LONG_CALL)
    page.fill("#play-max-tokens", "64")
    page.click("#play-send")
    page.wait("#play-facts", r"ended \(length\)")
    assert page.text("#play-answer figcaption") == "Calls get_weather · cut off"
    assert page.text("#play-answer pre").startswith('{"city": "place 0 ')
    page.choose("#play-endpoint", "v1/completions")
    page.click("#play-send")
    page.wait("#play-facts", "ended .* · first token")
    assert page.value("return document.getElementById('play-tools').disabled")
    assert page.violations() == []
