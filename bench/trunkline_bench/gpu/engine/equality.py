"""Compares tokens of engines: kernels with their references, and a request in a batch with the same request alone."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from trunkline.engine.v1.engine_pb2 import EngineStep
from trunkline_bench.gpu.ceilings import Rows
from trunkline_bench.gpu.engine.engine_run import EngineUnderTest, running
from trunkline_bench.gpu.shapes import DEMO_MODEL, Shapes
from trunkline_kernels.gpu import ragged_attention

PIECE = 128  # tokens
PROMPT_TOKENS = (1, 15, 16, 17, 60, 130, 300)


def check(shapes: Shapes) -> Rows:
    """Compares the demo model's tokens. Raises AssertionError if they differ."""
    prompts = _prompts(shapes, 2 if shapes.tiny else 6)
    references = _tokens(shapes, prompts, kernels="torch", dtype="float32")
    for options in ({},) if shapes.tiny else ({}, {"max_step_tokens": 48}, {"deterministic": True}):
        found = _tokens(shapes, prompts, dtype="float32", **options)
        assert found == references, f"tokens differ from the references' with {options}"
        yield {"what": "tokens equal the references'", "options": str(options), "tokens": sum(map(len, found))}
    yield from _deterministic(shapes)


def smoke(shapes: Shapes) -> dict[str, object]:
    """Compares the tokens of four requests with those of the CPU. Raises AssertionError if they differ."""
    prompts = _prompts(shapes, 2 if shapes.tiny else 4)
    found = _tokens(shapes, prompts, dtype="float32")
    on_cpu = replace(shapes, device=torch.device("cpu"))
    assert found == _tokens(on_cpu, prompts, dtype="float32", kernels="torch"), "tokens differ from the CPU's"
    return {"what": "tokens equal the CPU's", "requests": len(found), "tokens": sum(map(len, found))}


def _deterministic(shapes: Shapes) -> Rows:
    """Checks that with --deterministic a request's tokens and log-probabilities have the same bits alone and in a
    batch, however prompts are chunked. Raises AssertionError."""
    dtype = str(shapes.dtype).removeprefix("torch.")
    prompts = _prompts(shapes, 2 if shapes.tiny else 24)
    numbered = dict(enumerate(prompts))
    few = (1,) if shapes.tiny else (0, 1, 7, 23)
    alone = {handle: _told(shapes, {handle: prompts[handle]}, dtype=dtype)[handle] for handle in few}
    for max_step_tokens in (33,) if shapes.tiny else (8192, 300, 33):
        together = _told(shapes, numbered, dtype=dtype, max_step_tokens=max_step_tokens)
        same = {handle: together[handle] for handle in few} == alone
        # The interpreter multiplies with numpy, whose last bits depend on the batch.
        assert same or shapes.tiny, f"bits depend on the batch with steps of {max_step_tokens} tokens"
        yield {"what": "deterministic: same bits as alone", "among": len(prompts), "step": max_step_tokens}


def _prompts(shapes: Shapes, count: int) -> list[list[int]]:
    draw = random.Random(1)
    lengths = (3, 5) if shapes.tiny else PROMPT_TOKENS
    return [[draw.randrange(5, 400) for _ in range(lengths[n % len(lengths)])] for n in range(count)]


def _tokens(shapes: Shapes, prompts: list[list[int]], **options: object) -> list[list[int]]:
    with _demo(shapes, **options) as run:
        for handle, prompt in enumerate(prompts):
            run.submit(handle, prompt, 2 if shapes.tiny else 64)
        run.run()
        return [stream.tokens for stream in run.streams.values()]


def _told(shapes: Shapes, prompts: dict[int, list[int]], **options: object) -> dict[int, list[tuple[int, float]]]:
    """Tokens and log-probabilities by handle. Even handles are greedy, odd ones are sampled."""
    told: dict[int, list[tuple[int, float]]] = {handle: [] for handle in prompts}

    def tell(step: EngineStep) -> None:
        for output in step.outputs:
            told[output.handle] += [(entry.chosen.token_id, entry.chosen.logprob) for entry in output.logprobs]

    with _demo(shapes, deterministic=True, **options) as run:
        for handle, prompt in prompts.items():
            run.submit(handle, prompt, 2 if shapes.tiny else 48, logprobs=1, temperature=float(handle % 2))
        run.run(each_step=tell)
    return told


@contextmanager
def _demo(shapes: Shapes, **options: object) -> Iterator[EngineUnderTest]:
    """The demo model with shorter attention pieces, so that --deterministic splits even its short contexts."""
    shared = {"model": str(DEMO_MODEL), "load_format": "auto", "context_length": 512, "max_running_requests": 24}
    split, ragged_attention.SPLIT = ragged_attention.SPLIT, PIECE
    try:
        with running(shapes, **{**shared, **options}) as run:
            yield run
    finally:
        ragged_attention.SPLIT = split
