"""Scrapes a router over HTTP, and reads what it says."""

import shutil
import subprocess
from collections.abc import Mapping

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.router.cluster import PATIENCE_S

TEXT, OPENMETRICS = "text/plain", "application/openmetrics-text; version=1.0.0"


async def scrape(port: int, accept: str = TEXT, headers: Mapping[str, str] | None = None) -> httpx2.Response:
    """One answer, of a connection of its own."""
    async with httpx2.AsyncClient(timeout=PATIENCE_S, trust_env=False) as client:
        return await client.get(f"http://127.0.0.1:{port}/metrics", headers={"accept": accept, **(headers or {})})


async def samples(port: int) -> dict[str, float]:
    """The sum of the samples of each name."""
    response = await scrape(port)
    assert response.status_code == 200, response.text
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


def check_with_promtool(text: str) -> None:
    """Prometheus's own check of names, types and help."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed: it comes with Debian's package prometheus")
    checked = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, text=True, check=False)
    complaints = [line for line in checked.stderr.splitlines() if line and not line.startswith("vllm:")]
    assert not complaints, "names of vLLM are vLLM's; the others are ours:\n" + "\n".join(complaints)
