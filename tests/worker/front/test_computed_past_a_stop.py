"""A stop string that the front finds ends the engine's work, also within a run of byte tokens."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.worker.engine_rig import make_engine
from tests.worker.front.front_rig import Reader
from trunkline.engine.v1.engine_pb2 import EngineRequest
from trunkline.v1.generation_pb2 import SamplingParams
from trunkline.v1.worker_pb2 import GetModelResponse, Submit
from trunkline_worker.engine.engine import Engine
from trunkline_worker.front.cache_mirror import CacheMirror
from trunkline_worker.front.front import Front
from trunkline_worker.link.engine_link import EngineLink

MODEL = GetModelResponse(
    model="stories", vocab_size=512, context_length=512, block_size=16, kv_token_capacity=1024, eos_token_ids=[2],
    max_waiting_requests=100, max_waiting_tokens=100_000,
)  # fmt: skip


class Direct(EngineLink):
    """Gives messages to an engine of this process at once."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def submit(self, submit: Submit) -> None:
        self._engine.accept(EngineRequest(submits=[submit]))

    def finish(self, handle: int) -> None:
        self._engine.accept(EngineRequest(finished_handles=[handle]))

    def in_flight(self) -> set[int]:
        return set()


@pytest.mark.parametrize(("stop", "most_tokens"), [("\n\n", 2 + 2), ("never", 300)])
async def test_newlines_past_a_stop_string_are_not_computed(shared: Path, stop: str, most_tokens: int) -> None:
    path = shared / "models" / "stories260k"
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    newline = tokenizer.token_to_id("<0x0A>")
    assert newline is not None
    engine, reader = make_engine(path, kv_blocks=64), Reader()
    front = Front(MODEL, tokenizer, CacheMirror(1))
    front.connect(Direct(engine))
    sampling = SamplingParams(
        seed=1,
        temperature=0.0,
        max_tokens=300,
        ignore_eos=True,
        stop=[stop],
        logit_bias={newline: 100.0},
    )
    front.submit(Submit(handle=7, request_id="r", prompt_token_ids=[1], sampling=sampling), reader)
    num_computed = 0
    while engine.has_work:
        step = engine.step()
        if step is not None:
            num_computed += len(step.token_ids) + sum(len(output.token_ids) for output in step.outputs)
            front.on_step(step)
    assert reader.num_ends == 1
    assert reader.text == ("" if stop == "\n\n" else "\n" * 300)
    num_counted = sum(len(output.chunk.token_ids) for output in reader.news)
    assert num_counted == (2 if stop == "\n\n" else 300)
    assert num_counted <= num_computed <= most_tokens
