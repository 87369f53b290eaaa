"""Takes the pictures of docs/page.md: python -m tests.page.screenshots [FOLDER]

They show a cluster of real processes under a mixed load of two tenants, and first tokens that are slow on purpose. It
takes three minutes.
"""

import random
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

from openai import OpenAIError
from PIL import Image

from tests.page.browser import PHONE, Browser, running_browser
from tests.page.cluster import TENANTS, PageCluster, running_cluster
from tests.page.slow_first_tokens import SLOW_TOKENS

FOLDER = Path(__file__).parents[2] / "docs" / "images"
LOAD_S = 75.0  # before the first picture
COLOURS = 128  # of a picture: the page has few, and a picture takes a third of the bytes
SYSTEMS = (
    "You tell stories to children. Be kind, be short, and end each story well. " * 4,
    "You tell stories to children. Be kind, be short, and end each story well. " * 4
    + "The story has an owl in it. " * 6,
    "Once upon a time there was a fox who lived in the big forest with her friends. " * 5,
)
LOOKS: dict[str, dict[str, Any]] = {
    "light": {"colorScheme": "light"},
    "dark": {"colorScheme": "dark"},
    "phone": {"colorScheme": "light", **PHONE},
}


@contextmanager
def load(cluster: PageCluster, callers: int = 6) -> Iterator[None]:
    """Requests of both tenants, whose prompts share their beginnings, until the end of the block."""
    ended = threading.Event()

    def call(number: int) -> None:
        chance, tenant = random.Random(number), TENANTS[number % len(TENANTS)]
        while not ended.wait(chance.uniform(0.0, 0.4)):
            prompt = chance.choice(SYSTEMS) + f"Story {chance.randrange(40)}: "
            try:
                cluster.complete(tenant, prompt, max_tokens=chance.randrange(20, 160), temperature=0.8)
            except OpenAIError as refused:  # a quota is used up, as the page shows
                print(refused, file=sys.stderr)

    threads = [threading.Thread(target=call, args=[number]) for number in range(callers)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def take(page: Browser, path: Path, selector: str = "") -> None:
    """One picture with few colours."""
    page.screenshot(path, selector)
    with Image.open(path) as picture:
        small = picture.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
    small.save(path, optimize=True)
    print(f"{path}: {path.stat().st_size // 1024} KiB")


def take_timeline(page: Browser, cluster: PageCluster, request_id: str, path: Path) -> None:
    """A picture of one request's timeline."""
    address = f"{cluster.url}#request={request_id}"
    page.open(address, cluster.keys["operator"], viewport={"width": 1280, "height": 1600})
    page.wait("#timeline .verdict")
    page.click("#timeline summary")
    take(page, path, "#timeline")


def of_load(page: Browser, folder: Path, temporary: Path) -> None:
    """The page in each of its looks."""
    with running_cluster(temporary, "--kv-blocks=512") as cluster, load(cluster):
        threading.Event().wait(LOAD_S)
        for name, look in LOOKS.items():
            page.open(cluster.url, cluster.keys["operator"], **({"viewport": {"width": 1280, "height": 1020}} | look))
            page.wait("#freshness", "Live")
            page.wait("#request-rows tr:nth-child(12)")
            take(page, folder / f"page-{name}.png")
        prompt = SYSTEMS[0] + "Then the bear said: " * 60
        take_timeline(page, cluster, cluster.complete("acme", prompt), folder / "page-timeline.png")


def of_slow_tokens(page: Browser, folder: Path, temporary: Path) -> None:
    """Timelines of first tokens that are slow for six reasons."""
    for (arguments, workers), made in groupby(SLOW_TOKENS, lambda slow: (slow.arguments, slow.workers)):
        with running_cluster(temporary, *arguments, workers=workers) as cluster:
            for slow in made:
                take_timeline(page, cluster, slow.make(cluster), folder / f"slow-{slow.name}.png")


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary, running_browser() as page:
        of_load(page, folder, Path(temporary))
        of_slow_tokens(page, folder, Path(temporary))


if __name__ == "__main__":
    main()
