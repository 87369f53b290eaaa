"""The live page, as people see it and use it."""

import itertools
import re
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.processes import wait_until
from tests.page.browser import PHONE, Browser
from tests.page.cluster import MODEL, PageCluster, running_cluster
from tests.page.slow_first_tokens import unread_answer

STORY = "Once upon a time there was a fox who lived in the big forest with her friends, the bear and the owl. " * 2
TILE = ".tile"

# This model may end an answer within 30 ms, before a click from outside the page arrives.
STOPS_AT_THE_FIRST_TOKEN = """
const [facts, stop] = [document.getElementById("play-facts"), document.getElementById("play-stop")];
new MutationObserver((_, observer) => {
  if (!facts.textContent.startsWith("streaming")) return;
  observer.disconnect();
  stop.focus();
  stop.click();
}).observe(facts, { childList: true, characterData: true, subtree: true });
"""


def opened(page: Browser, cluster: PageCluster, caller: str = "operator", **look: object) -> None:
    """The page with live data."""
    page.open(cluster.url, cluster.keys[caller], **look)
    page.wait("#freshness", "Live")


def told(page: Browser, secrets: list[str]) -> list[str]:
    """Those of the secrets that the document has, hidden or not."""
    everything = page.everything()
    return [secret for secret in secrets if secret in everything]


def tile(address: str) -> str:
    return f'.tile:has(h3:text-is("{address}"))'


def test_without_a_key_or_with_a_wrong_one_nothing_is_shown(page: Browser, cluster: PageCluster) -> None:
    request_id = cluster.complete("acme", STORY)
    secrets = [request_id, *(worker.address for worker in cluster.workers), MODEL]
    page.open(cluster.url)
    page.wait("#refused", "An API key is needed")
    assert not told(page, secrets)
    page.click("#refused-button")
    page.fill("#api-key", "tl-wrong")
    page.press("Enter")
    page.wait("#refused", "does not accept this key")
    assert not told(page, secrets)
    page.click("#identity-button")
    page.fill("#api-key", cluster.keys["scraper"])
    page.press("Enter")
    page.wait("#refused", "may not see the fleet")
    assert not told(page, secrets)
    page.check_behaviour("401 (Unauthorized)", "403 (Forbidden)")


def test_a_key_is_entered_once_and_kept_out_of_the_document_and_addresses(page: Browser, cluster: PageCluster) -> None:
    page.open(cluster.url)
    page.wait("#refused")
    page.click("#refused-button")
    page.fill("#api-key", cluster.keys["operator"])
    page.press("Enter")
    page.wait("#freshness", "Live")
    page.wait(tile(cluster.workers[0].address))
    secret = cluster.keys["operator"].rpartition("-")[2]
    assert secret not in page.everything()
    addresses = page.value("return performance.getEntriesByType('resource').map((one) => one.name).join()")
    assert addresses
    assert secret not in addresses
    assert page.value("return [document.cookie, localStorage.length].join()") == ",0"
    page.click("#identity-button")
    page.click("#identity-forget")
    page.wait("#refused", "An API key is needed")
    assert cluster.workers[0].address not in page.everything()
    page.check_behaviour("401 (Unauthorized)")


@pytest.mark.slow
def test_the_first_screen_of_a_new_fleet_is_true(page: Browser, tmp_path: Path) -> None:
    with running_cluster(tmp_path, "--kv-blocks=512", workers=1) as new:
        opened(page, new)
        page.wait("#summary-title ~ dl", r"KV live\s*0 % of 512 blocks")
        page.wait(TILE, r"KV: live 0 % · cached 0 % · free 100 %")
        assert re.search(r"KV room\s*8,192 tokens", page.text(TILE))
        page.wait("#no-requests", "No request has ended yet")
        new.complete("acme", STORY, max_tokens=1)
        page.wait("#request-rows", "acme")
        page.wait("#tenant-rows", "acme")
        page.close()


def test_a_refused_request_names_the_stage_that_refused_it_and_not_where_its_time_went(
    page: Browser, cluster: PageCluster
) -> None:
    raw = cluster.refused("acme", STORY * 400)
    opened(page, cluster)
    page.fill("#request-id", raw)
    page.press("Enter")
    page.wait("#timeline .verdict", r"^It was refused .* its length were checked: CONTEXT_LENGTH_EXCEEDED \(prompt\)\.")
    assert "tokenized" not in page.text("#timeline .verdict")
    assert page.count("#timeline .marked") == 0


def test_a_user_sees_its_own_requests_alone_and_drains_nothing(page: Browser, cluster: PageCluster) -> None:
    own, other = cluster.complete("acme", STORY), cluster.complete("zeta", STORY)
    opened(page, cluster, "acme")
    page.wait("#request-rows", own[:12])
    page.wait("#tenant-rows", r"acme.* of 400\.0 k")
    everything = page.everything()
    assert other not in everything
    assert "zeta" not in everything
    assert page.count(TILE) == 2
    assert not page.is_visible(".tile-foot button")
    page.fill("#request-id", other)
    page.press("Enter")
    page.wait("#timeline", "was not found")
    page.check_behaviour("404 (Not Found)")


def test_a_timeline_says_where_the_time_to_first_token_went(page: Browser, cluster: PageCluster) -> None:
    request_id = cluster.complete("acme", STORY + "Then", max_tokens=4)
    opened(page, cluster)
    page.wait("#request-rows", request_id[:12])
    page.focus(f'#request-rows button[title="{request_id}"]')
    page.press("Enter")
    page.wait("#timeline .verdict", r"First token after .* For .* of it \(.*%\) the request ")
    story = page.text("#timeline")
    assert request_id in story
    assert re.search(r"prefill|queue|tokenizing", story)
    for worker in cluster.workers:
        assert worker.address in story  # the chosen one, and the one that was weighed
    assert "✓ chosen" in story
    assert page.value("return document.activeElement.id") == "timeline"
    page.click("#timeline summary")
    page.wait("#timeline details table", "Prefill in step")
    assert page.value("return location.hash") == f"#request={request_id}"
    page.press("Escape")
    page.wait_gone("#timeline")
    assert page.value("return document.activeElement.title") == request_id
    page.open(f"{cluster.url}#request={request_id}", cluster.keys["operator"])  # as a link in a chat
    page.wait("#timeline .verdict", "First token after")


def test_a_turn_whose_system_prompt_changed_says_from_which_token_on(page: Browser, cluster: PageCluster) -> None:
    def turn(day: str, *said: str) -> str:
        system = f"{STORY} Today is {day}. {STORY}"
        roles = ["system", *(["user", "assistant"] * len(said))[: len(said)]]
        messages: Any = [{"role": role, "content": text} for role, text in zip(roles, [system, *said], strict=True)]
        with cluster.client("acme") as client:
            raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=messages, max_tokens=4)
            return str(raw.headers["x-request-id"])

    turn("Monday", "Hello")
    second = turn("Sunday", "Hello", "Hello to you", "A story, please")
    opened(page, cluster)
    page.wait(f'#request-rows tr:has(button[title="{second}"])', r"changed after \d+")
    page.wait("#requests-scope", r"of these \d+ found little in a cache: .*changed 1")
    page.click(f'#request-rows button[title="{second}"]')
    page.wait("#timeline .cache-miss", r"earlier prompts share only the first 48 of its 125 tokens \(38 %\)")


def test_a_running_request_is_listed_and_followed_to_its_end(page: Browser, cluster: PageCluster) -> None:
    opened(page, cluster)
    page.choose("#request-filter", "running")
    with unread_answer(cluster, "unread"):
        page.click('#request-rows button[title="unread"]')
        page.wait("#timeline .timeline-head", "running")
        page.wait("#timeline .waterfall", "the request still runs there")
    page.wait("#timeline .timeline-head", "cancelled")


def test_the_playground_streams_and_stops(page: Browser, cluster: PageCluster) -> None:
    opened(page, cluster)
    page.wait("#play-model", MODEL)
    page.fill("#play-prompt", "Tell me a story about a fox.")
    page.fill("#play-max-tokens", "24")
    page.fill("#play-temperature", "0")  # a random answer may end before
    page.click("#play-send")
    page.wait("#play-facts", r"ended \(length\) · first token .*s · 24 tokens · .* tok/s")
    assert len(page.text("#play-answer")) > 24
    page.click("#play-facts button")
    page.wait("#timeline .verdict", "First token after")
    assert "/v1/chat/completions" in page.text("#timeline")
    page.choose("#play-endpoint", "v1/completions")
    page.fill("#play-prompt", "Once upon a time")
    page.fill("#play-max-tokens", "900")
    page.fill("#play-temperature", "1.5")
    page.value(STOPS_AT_THE_FIRST_TOKEN)
    page.click("#play-send")
    page.wait("#play-facts", "stopped · first token")
    assert page.value("return document.activeElement.id") == "play-send"
    page.fill("#play-max-tokens", "90000")
    page.click("#play-send")
    page.wait("#play-facts", "✕ .*max_tokens")
    page.check_behaviour("400 (Bad Request)")


def test_plots_and_prefixes_show_what_the_fleet_did(page: Browser, cluster: PageCluster) -> None:
    for number in range(3):
        cluster.complete("zeta", STORY + str(number), max_tokens=32)
    opened(page, cluster)
    page.wait("#prefix-rows", "zeta")
    page.click(".plot summary")
    page.wait(".plot table", "prefill")
    assert page.count(".plot") == 3
    drawn = "return document.querySelector('.plot .area.decode').getAttribute('d').startsWith('M')"
    wait_until(lambda: bool(page.value(drawn)), "two points are there, and the area between them")
    page.choose("#plot-worker", cluster.workers[0].address)
    page.wait(".plot .legend", r"decode \d")


@pytest.mark.parametrize(
    "look",
    [
        pytest.param({"colorScheme": "light"}, id="light"),
        pytest.param({"colorScheme": "dark"}, id="dark", marks=pytest.mark.slow),
        pytest.param({"colorScheme": "dark", **PHONE}, id="phone", marks=pytest.mark.slow),
    ],
)
def test_axe_finds_nothing_and_nothing_sticks_out(page: Browser, cluster: PageCluster, look: dict[str, object]) -> None:
    request_id = cluster.complete("acme", STORY)
    page.open(f"{cluster.url}#request={request_id}", cluster.keys["operator"], **look)
    page.wait("#timeline .verdict")
    page.value("for (const details of document.querySelectorAll('details')) details.open = true")
    page.wait(".tile tbody tr")  # a lane
    assert page.violations() == []
    assert page.value("return document.documentElement.scrollWidth <= innerWidth")
    page.click("#identity-button")
    assert page.violations() == []


@pytest.mark.slow
def test_a_worker_is_drained_and_undrained_after_questions_and_its_tile_follows_its_death_and_return(
    page: Browser, cluster: PageCluster
) -> None:
    worker = cluster.workers[1]
    opened(page, cluster)
    page.wait(tile(worker.address), "Ready")
    page.click(f"{tile(worker.address)} .tile-foot button")
    page.wait("#drain-dialog", f"Drain {worker.address}\\?")
    page.press("Escape")
    page.wait_gone("#drain-dialog")
    page.wait(tile(worker.address), "Ready")
    page.click(f"{tile(worker.address)} .tile-foot button")
    page.click("#drain-confirm")
    page.wait_gone("#drain-dialog")
    page.wait(tile(worker.address), "Draining")
    page.wait("#announcements", "drain")
    page.click(f"{tile(worker.address)} .tile-foot button")
    page.wait("#drain-dialog", f"End the drain of {worker.address}\\?")
    page.click("#drain-confirm")
    page.wait_gone("#drain-dialog")
    page.wait(tile(worker.address), "Ready")
    page.wait("#announcements", "drain .* has ended|is ready")
    cluster.complete_many("zeta", [f"{number} {STORY}" for number in range(8)])
    worker.process.popen.kill()
    page.wait(tile(worker.address), "Connecting")
    page.wait(f"{tile(worker.address)} .reason")  # of the first attempt to connect again
    page.wait("#summary-title ~ dl", "1 of 2 ready")
    cluster.restart(worker)
    # A worker that was lost soon after it had connected must answer a trial request first.
    page.wait(tile(worker.address), "Ready|requests failed there recently")
    numbers = itertools.count(1000)

    def is_ready() -> bool:
        # One of them is its trial. No worker has their prompts.
        cluster.complete_many("zeta", [f"{next(numbers)} {STORY}" for _ in range(8)])
        return "Ready" in page.text(tile(worker.address))

    wait_until(is_ready, "the tile is ready again")


@pytest.mark.slow
def test_old_data_is_marked_and_the_page_connects_again(page: Browser, cluster: PageCluster) -> None:
    opened(page, cluster)
    assert cluster.router is not None
    cluster.router.popen.kill()
    page.wait("#freshness", "Stale for .* trying again in")
    assert page.is_visible(TILE)
    cluster.router.stop()
    cluster.start_router()
    page.wait("#freshness", "Live")
    page.wait(TILE, "Ready")
    page.check_behaviour("ERR_")  # the browser logs each attempt
