"""Clients for vectors and rerankings, as they come, against a router before a fake worker."""

import asyncio
import json
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from pydantic import SecretStr

from tests.clients.edge import ANY_KEY, CLIENTS_ENVIRONMENT
from tests.router.fake_worker import FakeWorker, vector_of
from tests.router.openai.openai_rig import OpenAiClient
from tests.router.openai.openai_rig import client as router_and_client
from trunkline.v1.worker_pb2 import Capability, PoolingModel

PROGRAMS = Path(__file__).parent / "programs"
CAPABILITIES = [Capability.CAPABILITY_VECTORS, Capability.CAPABILITY_SCORES]
INPUTS = ["hi", "there"]

pytestmark = pytest.mark.slow  # imports take seconds


@pytest_asyncio.fixture
async def served() -> AsyncIterator[tuple[OpenAiClient, FakeWorker, str]]:
    """A client, the worker, and the router's address over HTTP."""
    worker = FakeWorker("w", capabilities=CAPABILITIES, pooling=PoolingModel(dimensions=2, offered_dimensions=[1]))
    async with router_and_client(worker) as asks:
        yield asks, worker, f"http://127.0.0.1:{asks.router.http_port}"


def vectors_of(worker: FakeWorker) -> list[list[float]]:
    """Those of its submits, which it forgets."""
    submits = list(worker.submits)
    worker.submits.clear()
    return [vector_of(submit.prompt_token_ids)[: submit.work.dimensions or None] for submit in submits]


async def test_the_client_of_openai_gets_vectors(served: tuple[OpenAiClient, FakeWorker, str]) -> None:
    from openai import AsyncOpenAI, BadRequestError

    _, worker, root = served
    async with AsyncOpenAI(base_url=f"{root}/v1", api_key=ANY_KEY, max_retries=0) as client:
        given: list[Any] = ["hi", INPUTS, [5, 6, 7], [[5, 6], [7]]]
        for inputs in given:  # the client asks for base64 by itself
            answer = await client.embeddings.create(model="tiny", input=inputs)
            type(answer).model_validate(answer.to_dict())
            assert [each.embedding for each in answer.data] == vectors_of(worker)
            assert answer.usage.total_tokens == answer.usage.prompt_tokens > 0
        plain = await client.embeddings.create(
            model="tiny", input="hi", encoding_format="float", dimensions=1, user="u"
        )
        assert worker.submits[-1].work.dimensions == 1
        assert [each.embedding for each in plain.data] == vectors_of(worker)
        with pytest.raises(BadRequestError) as refused:
            await client.embeddings.create(model="tiny", input="hi", dimensions=7)
        assert refused.value.param == "dimensions"


async def test_the_embeddings_of_langchain_are_vectors_of_its_texts(
    served: tuple[OpenAiClient, FakeWorker, str],
) -> None:
    from langchain_openai import OpenAIEmbeddings

    _, worker, root = served
    client = OpenAIEmbeddings(
        model="tiny", base_url=f"{root}/v1", api_key=SecretStr(ANY_KEY), check_embedding_ctx_length=False
    )
    assert await asyncio.to_thread(client.embed_documents, INPUTS) == vectors_of(worker)
    assert [await asyncio.to_thread(client.embed_query, "hi")] == vectors_of(worker)


async def what_came(*command: str | Path, cwd: Path | None = None) -> Any:
    """What a program printed last, which is JSON."""
    done = await asyncio.create_subprocess_exec(
        *map(str, command),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=cwd,
        env={**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "PYTHONPATH": ""},
    )
    printed, problems = await done.communicate()
    assert done.returncode == 0, problems.decode()[-4000:]
    return json.loads(printed.decode().splitlines()[-1])


async def test_litellm_embeds_and_ranks_by_each_of_its_providers(
    served: tuple[OpenAiClient, FakeWorker, str], clients_python: Path
) -> None:
    _, worker, root = served
    came = await what_came(clients_python, PROGRAMS / "call_pooling.py", root, "tiny")
    assert came["openai"] == came["hosted_vllm"] == vectors_of(worker)[:2]
    assert came["cohere_ranks"] == came["jina_ranks"] == [1, 2, 0]
    assert came["vllm_ranks"] == [1, 2]


async def test_cohere_langchain_and_llama_index_embed_and_rank(
    served: tuple[OpenAiClient, FakeWorker, str], clients_python: Path
) -> None:
    asks, worker, root = served
    await asks.answer("/v1/embeddings", input=INPUTS)
    vectors = vectors_of(worker)
    came = await what_came(clients_python, PROGRAMS / "call_pooling_classes.py", root, "tiny")
    ways = ("openai", "openai_query", "openai_like", "openai_like_query")
    assert {way: came[f"llama_index_{way}"] for way in ways} == dict.fromkeys(ways, vectors)
    assert came["cohere_v1"] == came["cohere_v2"] == [1, 2, 0]
    few = ("cohere_v2_top", "langchain_cohere", "langchain_jina", "llama_index_cohere", "llama_index_jina")
    assert [came[way] for way in few] == [[1, 2]] * len(few)


async def test_clients_of_npm_get_vectors(served: tuple[OpenAiClient, FakeWorker, str]) -> None:
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("Node or npm is absent, and they are optional: its clients were not run")
    asks, worker, root = served
    await asks.answer("/v1/embeddings", input=INPUTS)
    vectors = vectors_of(worker)
    installed = CLIENTS_ENVIRONMENT / "node"
    program = shutil.copy(Path(__file__).parent / "node" / "embed.mjs", installed)
    came = await what_came("node", program, root, "tiny", cwd=installed)
    ways = ("openai", "floats", "embeddedMany")
    assert {way: came[way] for way in ways} == dict.fromkeys(ways, vectors)
    assert came["embedded"] == vectors[:1]
    assert came["shorter"] == [vectors[0][:1]]
    assert came["tokenIds"] == [vector_of([5, 6]), vector_of([7])]
    assert came["tokens"] == sum(length for length, _ in vectors)
    assert came["refused"] == ["BadRequestError", 400, "dimensions"]
