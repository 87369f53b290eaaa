"""A front without an engine, and those who read what it says."""

from collections.abc import Callable
from dataclasses import dataclass, field

from tokenizers import Tokenizer

from tests.worker.engine_rig import DEMO_MODEL
from trunkline.v1.worker_pb2 import GetModelResponse, SequenceOutput, Submit
from trunkline_worker.link.engine_link import EngineLink

TOKENIZER = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))


MODEL = GetModelResponse(
    model="demo", vocab_size=2048, context_length=512, block_size=16, kv_token_capacity=4096, eos_token_ids=[1],
    max_waiting_requests=100, max_waiting_tokens=100_000,
)  # fmt: skip


PROMPT = TOKENIZER.encode("Once upon").ids


class Link(EngineLink):
    """Notes what the engine is told."""

    def __init__(self) -> None:
        self.submitted: list[int] = []
        self.aborted: list[int] = []
        self.finished: list[int] = []

    def submit(self, submit: Submit) -> None:
        self.submitted.append(submit.handle)

    def abort(self, handle: int) -> None:
        self.aborted.append(handle)

    def finish(self, handle: int) -> None:
        self.finished.append(handle)

    def in_flight(self) -> set[int]:
        return set()


@dataclass(eq=False)
class Reader:
    """Keeps the news of a choice. `fails`: asked with each, whether to raise instead; `on_news`: called with each."""

    fails: Callable[[SequenceOutput], bool] = lambda output: False
    on_news: Callable[[], None] = lambda: None
    news: list[SequenceOutput] = field(default_factory=list)

    def __call__(self, output: SequenceOutput) -> None:
        if self.fails(output):
            raise RuntimeError("a reader's bug")
        self.news.append(output)
        self.on_news()

    @property
    def text(self) -> str:
        return "".join(output.chunk.text for output in self.news)

    @property
    def reasons(self) -> list[str]:
        return [output.error.reason for output in self.news if output.HasField("error")]

    @property
    def num_ends(self) -> int:
        return sum(output.HasField("error") or bool(output.chunk.finish_reason) for output in self.news)
