"""Chromium, driven through playwright-core in a process of Node."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.clients.edge import CLIENTS_ENVIRONMENT

PROGRAM = Path(__file__).parent / "node" / "drive.mjs"
INSTALLED = CLIENTS_ENVIRONMENT / "page"  # make clients puts the packages there
NAMES = ("chromium", "chromium-browser", "google-chrome")
QUIT_S = 10.0

PHONE: dict[str, Any] = {"viewport": {"width": 390, "height": 844}, "deviceScaleFactor": 2, "hasTouch": True}


class Browser:
    """One browser with one tab. A command that fails raises AssertionError."""

    def __init__(self, node: str, chromium: str) -> None:
        self._process = subprocess.Popen(
            [node, PROGRAM, INSTALLED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._ask("launch", executable=chromium)

    def _ask(self, command: str, **given: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"command": command, **given}) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        assert "error" not in answer, answer["error"]
        return answer["value"]

    def open(self, url: str, key: str = "", **look: Any) -> None:
        """Opens an address in a new tab.  key: already entered;  look: colorScheme, viewport and the like"""
        self._ask("open", url=url, key=key, look=look)

    def close(self) -> None:
        """Closes the tab: its server may end."""
        self._ask("close")

    def click(self, selector: str) -> None:
        self._ask("click", selector=selector)

    def fill(self, selector: str, text: str) -> None:
        self._ask("fill", selector=selector, text=text)

    def choose(self, selector: str, value: str) -> None:
        self._ask("choose", selector=selector, value=value)

    def press(self, key: str) -> None:
        self._ask("press", key=key)

    def focus(self, selector: str) -> None:
        self._ask("focus", selector=selector)

    def wait(self, selector: str, text: str = "") -> None:
        """Waits until an element is visible.  text: a regular expression that its text matches"""
        self._ask("wait", selector=selector, text=text)

    def wait_gone(self, selector: str) -> None:
        self._ask("gone", selector=selector)

    def text(self, selector: str) -> str:
        return str(self._ask("text", selector=selector))

    def count(self, selector: str) -> int:
        return int(self._ask("count", selector=selector))

    def is_visible(self, selector: str) -> bool:
        return bool(self._ask("is_visible", selector=selector))

    def everything(self) -> str:
        """The document, with all that is hidden."""
        return str(self._ask("everything"))

    def value(self, body: str) -> Any:
        """What a function returns that runs in the page."""
        return self._ask("value", body=body)

    def screenshot(self, path: Path, selector: str = "", *, full: bool = False) -> None:
        self._ask("screenshot", path=str(path), selector=selector, full=full)

    def violations(self) -> list[str]:
        """Rules of accessibility that the page breaks, as axe finds them."""
        return list(self._ask("violations"))

    def check_behaviour(self, *expected: str) -> None:
        """Asserts that the page has called no other host since the last check, and that its console had no error or
        warning but those that contain an expected text: the browser itself logs each refusal of the router."""
        told = self._ask("problems")
        assert not told["foreign"], f"the page called another host: {told['foreign']}"
        problems = [problem for problem in told["problems"] if not any(text in problem for text in expected)]
        assert not problems, problems

    def quit(self) -> None:
        self._ask("quit")
        self._process.wait(QUIT_S)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


@contextmanager
def running_browser() -> Iterator[Browser]:
    """Skips the test where Node or Chromium is absent: both are optional."""
    node, npm = shutil.which("node"), shutil.which("npm")
    chromium = next((found for name in NAMES if (found := shutil.which(name))), None)
    if node is None or npm is None or chromium is None:
        pytest.skip("Node, npm or Chromium is absent, and they are optional: the live page was not tried")
    assert (INSTALLED / "node_modules").is_dir(), f"{INSTALLED} is absent: make clients"
    browser = Browser(node, chromium)
    try:
        yield browser
    finally:
        browser.quit()
