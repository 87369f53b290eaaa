"""Models of vectors and scores in a fleet of real processes, beside one that generates."""

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import httpx2
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from tests.cluster.processes import Process, Worker, script
from tests.worker.engine_rig import DEMO_MODEL
from tests.worker.pooled.checkpoints import VOCAB, write_model, write_modules
from tests.worker.pooled.pooled_rig import prompts_of
from trunkline import Client
from trunkline.errors import InvalidRequest
from trunkline_bench.servers.ports import free_port
from trunkline_router.request.inputs import MAX_INPUTS

CLS, SEP = 3, 4
QUERY, DOCUMENTS = "w7 w8 w9", ["w10 w11", "w12 w13 w14 w15 w16", "w17"]


def write_tokenizer(folder: Path) -> None:
    """Writes a tokenizer of the words "w5", "w6" and so on, which adds the marks of BERT."""
    words = {f"w{token_id}": token_id for token_id in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="w3 $A w4", pair="w3 $A w4 $B:1 w4:1", special_tokens=[("w3", CLS), ("w4", SEP)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))


@dataclass
class Fleet:
    """Two embedding workers, one that ranks, and one that generates, behind one router."""

    embedders: list[Worker]
    ranks: Any  # the reranker, as transformers has it
    address: str
    http: str


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    vectors, scores = (tmp_path_factory.mktemp("models") / name for name in ("vectors", "scores"))
    write_model(vectors, "bert", "Model")
    write_modules(vectors, pooling="pooling_mode_mean_tokens")
    write_tokenizer(vectors)
    ranks = write_model(scores, "bert", "ForSequenceClassification", num_labels=1)
    write_tokenizer(scores)
    with ExitStack() as stack:
        started = [
            Worker(vectors, "--deterministic"),
            Worker(vectors, "--deterministic"),
            Worker(scores, "--deterministic"),
            Worker(DEMO_MODEL, "--deterministic", "--dtype=float32", "--kv-blocks=256"),
        ]
        for worker in started:
            stack.callback(worker.stop)
        port, http_port = free_port(), free_port()
        router = Process(
            script("trunkline-router"),
            f"--workers={','.join(worker.address for worker in started)}",
            f"--port={port}",
            f"--http-port={http_port}",
        )
        stack.callback(router.stop)
        for worker in started:
            worker.wait_ready()
            router.wait_for(f'{worker.address}.*"worker connected"')
        yield Fleet(started[:2], ranks, f"127.0.0.1:{port}", f"http://127.0.0.1:{http_port}")


async def test_models_of_each_task_are_served_behind_one_router(fleet: Fleet) -> None:
    async with Client(fleet.address) as client:
        tasks = {model.name: model.task for model in await client.list_models()}
        assert tasks == {"vectors": "embed", "scores": "score", "tiny-tales": "generate"}
        (vector,) = (await client.embed(QUERY, model="vectors")).vectors
        assert sum(value * value for value in vector) == pytest.approx(1.0, abs=1e-5)
        assert (await client.complete("Once upon a time", model="tiny-tales", max_tokens=3)).text
        for wrong in (client.embed(QUERY, model="tiny-tales"), client.complete(QUERY, model="vectors")):
            with pytest.raises(InvalidRequest, match="model"):
                await wrong


async def test_a_query_and_its_documents_are_ranked_as_transformers_does(fleet: Fleet) -> None:
    query = [CLS, *_ids(QUERY), SEP]
    expected = []
    for document in DOCUMENTS:
        rest = [*_ids(document), SEP]
        with torch.inference_mode():
            logits = fleet.ranks(
                input_ids=torch.tensor([query + rest]),
                token_type_ids=torch.tensor([[0] * len(query) + [1] * len(rest)]),
            ).logits
        expected.append(float(torch.sigmoid(logits[0, 0])))
    async with httpx2.AsyncClient(base_url=fleet.http, timeout=60, trust_env=False) as http:
        body = {"model": "scores", "query": QUERY, "documents": DOCUMENTS}
        answer = (await http.post("/v1/rerank", json=body)).json()
    ranked = sorted(range(len(DOCUMENTS)), key=lambda index: -expected[index])
    assert [result["index"] for result in answer["results"]] == ranked
    scores = [result["relevance_score"] for result in answer["results"]]
    assert scores == pytest.approx([expected[index] for index in ranked], abs=1e-5)


def _ids(text: str) -> list[int]:
    return [int(word.removeprefix("w")) for word in text.split()]


async def test_outputs_of_busy_workers_are_those_of_idle_ones_to_the_bit(fleet: Fleet) -> None:
    """First each worker has one request at a time, then all of them at once."""
    draw = Random(3)
    batches = [prompts_of([draw.randint(1, 250) for _ in range(draw.choice([1, 3, 24]))], seed=n) for n in range(8)]

    async def asked(client: Client, number: int) -> tuple[str, object]:
        batch = batches[number]
        generated = client.complete(
            f"{number} foxes went to", model="tiny-tales", max_tokens=40, temperature=0.8, seed=number
        )
        vectors = client.embed(batch, model="vectors")
        scores = client.score(DOCUMENTS * 4, model="scores", queries=f"w{number + 5} w7")
        texts, embedded, ranked = await asyncio.gather(generated, vectors, scores)
        return texts.text, ([vector.tobytes() for vector in embedded.vectors], ranked.values)

    async with Client(fleet.address) as client:
        alone = [await asked(client, number) for number in range(len(batches))]
        together = await asyncio.gather(*(asked(client, number) for number in [*range(len(batches))] * 3))
    assert together == alone * 3
    assert len({text for text, _ in alone}) == len(alone), "each text is another one"


async def test_a_call_outlives_the_death_of_its_worker(fleet: Fleet) -> None:
    """The last test: one worker is gone afterwards."""
    inputs = [[5 + (index + offset) % 90 for offset in range(1 + index % 200)] for index in range(MAX_INPUTS)]
    async with Client(fleet.address, model="vectors") as client:
        call = asyncio.create_task(client.embed(inputs))
        busy = await _busy(fleet.embedders)
        os.killpg(busy.process.popen.pid, signal.SIGKILL)
        found = await call
        assert found.usage.resumptions == 1
        few = [0, 1, 200, MAX_INPUTS - 1]
        again = await client.embed([inputs[index] for index in few])
    assert len(found.vectors) == MAX_INPUTS
    for index, vector in zip(few, again.vectors, strict=True):
        assert list(found.vectors[index]) == pytest.approx(list(vector), abs=1e-5)


async def _busy(workers: list[Worker]) -> Worker:
    """The worker that has inputs, once it has computed some: their outputs count when it dies."""
    most = dict.fromkeys(range(len(workers)), 0)
    async with asyncio.timeout(60):
        while True:
            for number, worker in enumerate(workers):
                load = await asyncio.to_thread(worker.load)
                left = load.running + load.waiting
                most[number] = max(most[number], left)
                if 0 < left < 0.9 * most[number]:
                    return worker
