"""One cluster for all clients: none of them breaks it."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from tests.clients.edge import ANY_KEY, CLIENTS_ENVIRONMENT, Edge, running_edge
from tests.playing.families import HERMES
from tests.playing.worker import COMMAND
from tests.worker.engine_rig import DEMO_MODEL

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI

GREETING, QUESTION = "Good morning.", "What is the weather in Paris?"
CITY, WEATHER = "Paris", "Paris: 18 degrees and clear"  # the argument of the call, and its result
FIRST_THOUGHT, LAST_THOUGHT, ANSWER = "I have to look it up.", "Now I know.", "It is clear in Paris, at 18 degrees."
# What the model says to a prompt that ends with one of these.
ANSWERS = {
    GREETING: "Good morning to you. ☕",
    QUESTION: HERMES.thought(FIRST_THOUGHT) + HERMES.call("get_weather", {"city": CITY}),
    WEATHER: HERMES.thought(LAST_THOUGHT) + ANSWER,
}


@pytest.fixture(scope="package")
def edge() -> Iterator[Edge]:
    with running_edge(DEMO_MODEL) as running:
        yield running


@pytest.fixture(scope="package")
def player(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Edge]:
    """With a model that calls tools, as ANSWERS say."""
    model = HERMES.write(tmp_path_factory.mktemp("models") / "player", ANSWERS)
    with running_edge(model, command=COMMAND) as running:
        yield running


@pytest.fixture(scope="module")
def client(edge: Edge) -> Iterator["OpenAI"]:
    """OpenAI's own."""
    from openai import OpenAI  # takes a second, and collecting must not

    with OpenAI(base_url=edge.url, api_key=ANY_KEY, max_retries=0, timeout=60) as made:
        yield made


@pytest_asyncio.fixture
async def async_client(edge: Edge) -> AsyncIterator["AsyncOpenAI"]:
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=edge.url, api_key=ANY_KEY, max_retries=0, timeout=60) as made:
        yield made


@pytest.fixture(scope="session")
def clients_python() -> Path:
    """The interpreter beside which clients are installed that cannot share an environment with the newest `openai`."""
    python = CLIENTS_ENVIRONMENT / "bin" / "python"
    assert python.exists(), f"{CLIENTS_ENVIRONMENT} is absent: make clients"
    return python
