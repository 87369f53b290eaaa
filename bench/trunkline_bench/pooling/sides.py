"""The two sides of the comparison: functions that embed texts."""

import json
import re
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from openai import OpenAI

from trunkline_bench.servers.http_stack import http_stack, log_ends, process, wait_for_answer
from trunkline_bench.servers.ports import free_port

PEER_PROCESS = Path(__file__).parent / "peer_process.py"
NAME = "model"
POSITIONS = re.compile(r'^trunkline_worker_batch_tokens_total\{.*kind="(\w+)".*\} (\S+)$', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Run:
    """What a side made of texts.

    vectors: [num_texts, components]; padding: share of the positions that it computed, None if it does not tell
    """

    seconds: float
    vectors: NDArray[np.float32]
    padding: float | None


Side = Callable[[list[str]], Run]


@contextmanager
def served(model: Path, threads: int, folder: Path, flags: Sequence[str] = ()) -> Iterator[tuple[str, Side]]:
    """Runs our router and worker. Yields their URL, and a side that embeds all texts with one request."""
    port = free_port()
    with http_stack(model, NAME, folder, (f"--threads={threads}", f"--metrics-port={port}", *flags)) as url:
        try:
            wait_for_answer(f"{url}/tokenize", {"model": NAME, "prompt": "a"})
        except TimeoutError as error:
            raise SystemExit(f"bench-pooling: {error}\n{log_ends(folder)}") from error
        call = partial(_embed, f"{url}/v1", {"truncate_prompt_tokens": -1})

        def embed(texts: list[str]) -> Run:
            run = call(texts)
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60.0) as page:
                positions = {kind: float(count) for kind, count in POSITIONS.findall(page.read().decode())}
            return replace(run, padding=positions["padding"] / sum(positions.values()))

        yield url, embed


def _embed(base_url: str, extra_body: dict[str, int], texts: list[str]) -> Run:
    """One request over HTTP with all texts."""
    client = OpenAI(base_url=base_url, api_key="none", timeout=600.0, max_retries=0)
    started_s = time.perf_counter()
    answer = client.embeddings.create(model=NAME, input=texts, extra_body=extra_body)
    vectors = np.array([one.embedding for one in answer.data], np.float32)
    return Run(time.perf_counter() - started_s, vectors, None)


@contextmanager
def infinity(python: Path, model: Path, threads: int, folder: Path) -> Iterator[Side]:
    """Runs the server of infinity-emb. Yields a side that embeds all texts with one request."""
    port = free_port()
    flags = ("--engine=torch", "--device=cpu", "--dtype=float32", "--host=127.0.0.1", f"--port={port}")
    command = (str(python.with_name("infinity_emb")), "v2", f"--model-id={model}", f"--served-model-name={NAME}")
    environment = {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}
    url = f"http://127.0.0.1:{port}"
    with process([*command, *flags], environment, folder / "infinity.log"):
        try:
            wait_for_answer(f"{url}/embeddings", {"model": NAME, "input": ["a"]})
        except TimeoutError as error:
            raise SystemExit(f"bench-pooling: {error}\n{log_ends(folder)}") from error
        yield partial(_embed, url, {})


@contextmanager
def peer(python: Path, model: Path, threads: int, folder: Path, batchings: Sequence[str]) -> Iterator[dict[str, Side]]:
    """Runs peer_process.py. Yields a side for each of its batchings."""
    command = [str(python), str(PEER_PROCESS), str(model), str(threads)]
    with (
        (folder / "peer.log").open("wb") as log,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        jobs, answers = process.stdin, process.stdout

        def embed(batching: str, texts: list[str]) -> Run:
            file = folder / "vectors.npy"
            print(json.dumps({"texts": texts, "batching": batching, "vectors": str(file)}), file=jobs, flush=True)
            line = answers.readline()
            if not line:
                raise SystemExit(f"bench-pooling: sentence-transformers failed:\n{log_ends(folder)}")
            told = json.loads(line)
            return Run(told["seconds"], np.load(file), 1 - told["tokens"] / told["positions"])

        yield {batching: partial(embed, batching) for batching in batchings}
        jobs.close()
