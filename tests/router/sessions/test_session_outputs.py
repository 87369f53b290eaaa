"""Outputs that take the short way for tokens come to the same as when each is checked in full."""

from collections.abc import Callable
from random import Random

import pytest
from google.protobuf.message import DecodeError

from trunkline.status import no_worker
from trunkline.v1.generation_pb2 import OutputChunk, PromptReport, SamplingParams, TokenLogprob, TokenLogprobs
from trunkline.v1.worker_pb2 import GrantReport, SequenceOutput, SessionResponse, SessionWelcome, Submit
from trunkline_router.workers.claims import FalseClaim
from trunkline_router.workers.session import WorkerSession

VOCAB_SIZE = 50
MAX_TOKENS = 6
NUM_CHOICES = 12
SEEDS = 400


class Heard:
    """A session with open choices and grants, and all that comes of what it is told."""

    def __init__(self, draw: Random) -> None:
        self.told: list[object] = []
        self.session = WorkerSession(vocab_size=VOCAB_SIZE)
        submits = [
            Submit(
                choice=draw.choice([0, 0, 1]),
                prompt_token_ids=[1, 2],
                sampling=SamplingParams(max_tokens=MAX_TOKENS, logprobs=draw.choice([None, 0])),
            )
            for _ in range(NUM_CHOICES)
        ]
        fate = [draw.choice(["takes", "takes", "takes", "does not follow", "raises"]) for _ in submits]
        self.session.submit(submits, [self._sink(name) for name in fate])
        self.session.grant([Submit(sampling=SamplingParams(max_tokens=MAX_TOKENS))] * 2, self._grant)
        self.claim = ""

    def _sink(self, fate: str) -> Callable[[SequenceOutput], bool]:
        def hear(output: SequenceOutput) -> bool:
            self.told.append(output.SerializeToString(deterministic=True))
            if fate == "raises" and output.chunk.token_ids[:1] == [7]:
                raise RuntimeError("a sink's bug")
            return fate != "does not follow" or output.chunk.token_ids[:1] != [8]

        return hear

    def _grant(self, handle: int, report: GrantReport | None) -> None:
        self.told.append((handle, report and report.SerializeToString()))

    @property
    def outcome(self) -> tuple[object, ...]:
        session, outputs = self.session, self.session.outputs
        aborted = list(session._pending.abort_handles)
        return (
            self.told,
            outputs.open,
            list(outputs.granted),
            aborted,
            outputs._num_ended,
            outputs._num_false,
            self.claim,
        )


def said(draw: Random, choices: list[int]) -> SequenceOutput:
    """Of an honest worker most of the time, each kind of lie among them."""
    handle = draw.randrange(1, NUM_CHOICES + 1)
    output = SequenceOutput(handle=handle)
    kind = draw.choice(["token"] * 12 + ["tokens", "nothing", "end", "error", "grant", "lie", "lie"])
    if kind == "error":
        output.error.CopyFrom(no_worker("it drains").to_proto())
        return output
    if kind == "grant":
        output.handle = NUM_CHOICES + draw.randrange(1, 3)
        output.granted.ended = draw.random() < 0.5
        return output
    count = {"nothing": 0, "tokens": draw.randrange(2, MAX_TOKENS + 2)}.get(kind, 1)
    output.chunk.index = choices[handle - 1]
    output.chunk.token_ids.extend(draw.randrange(VOCAB_SIZE) for _ in range(count))
    output.chunk.text = "x" * draw.randrange(5)
    if kind == "end":
        output.chunk.finish_reason = draw.choice([1, 2])  # type: ignore[assignment]
    if draw.random() < 0.1:
        output.prompt.CopyFrom(PromptReport(prompt_tokens=2, cached_tokens=draw.randrange(4)))
    if kind == "lie":
        lie(draw, output)
    return output


def lie(draw: Random, output: SequenceOutput) -> None:
    chunk = output.chunk
    match draw.randrange(7):
        case 0:
            chunk.token_ids[:] = [draw.choice([VOCAB_SIZE, -1, (1 << 31) - 1, -(1 << 31)])]
        case 1:
            chunk.index += 1
        case 2:
            chunk.finish_reason = draw.choice([99, -1])  # type: ignore[assignment]
        case 3:
            chunk.logprobs.extend([TokenLogprobs(chosen=TokenLogprob(logprob=draw.choice([float("nan"), -1.0])))])
        case 4:
            output.handle = draw.choice([0, NUM_CHOICES + 3, 1 << 60])
        case 5:
            output.ClearField("chunk")
        case 6:
            output.granted.ended = True


@pytest.mark.filterwarnings("ignore")
async def test_a_message_comes_to_what_a_full_check_of_each_of_its_outputs_comes_to() -> None:
    num_claims = num_tokens = 0
    for seed in range(SEEDS):
        whole, one_by_one = Heard(Random(seed)), Heard(Random(seed))
        draw = Random(f"news {seed}")
        choices = [choice.index for choice in whole.session.outputs.open.values()]
        for _ in range(8):
            response = SessionResponse(outputs=[said(draw, choices) for _ in range(draw.randrange(1, 9))])
            try:
                await whole.session.receive(response.SerializeToString(), unwelcome)
            except FalseClaim as claim:
                whole.claim = str(claim)
            try:
                for output in response.outputs:
                    one_by_one.session.outputs.hand_out(output)
            except FalseClaim as claim:
                one_by_one.claim = str(claim)
            assert whole.outcome == one_by_one.outcome
            assert whole.session.num_step_outputs == one_by_one.session.num_step_outputs
            num_tokens += not whole.claim and any(len(output.chunk.token_ids) == 1 for output in response.outputs)
            if whole.claim:
                num_claims += 1
                break
    assert num_claims > SEEDS / 10, "lies are among them"
    assert num_tokens > SEEDS, "and tokens that need no full check"


def unwelcome(welcome: SessionWelcome) -> None:
    raise AssertionError("no welcome was sent")


@pytest.mark.parametrize("num_before", [0, 1, 3])
@pytest.mark.parametrize("others", [[], [49]])
@pytest.mark.parametrize("token_id", [VOCAB_SIZE, -1, -(1 << 31), (1 << 31) - 1])
async def test_one_token_id_that_is_none_is_seen_whatever_came_before(
    num_before: int, others: list[int], token_id: int
) -> None:
    heard: list[SequenceOutput] = []
    session = WorkerSession(vocab_size=VOCAB_SIZE)
    session.submit([Submit(sampling=SamplingParams(max_tokens=MAX_TOKENS))], [heard.append])
    outputs = [SequenceOutput(handle=1, chunk=OutputChunk(token_ids=[49])) for _ in range(num_before)]
    outputs.append(SequenceOutput(handle=1, chunk=OutputChunk(token_ids=[*others, token_id])))
    await session.receive(SessionResponse(outputs=outputs).SerializeToString(), unwelcome)
    assert [output.HasField("error") for output in heard] == [False] * num_before + [True]
    assert f"token id {token_id} is not in" in heard[-1].error.message


async def test_what_is_no_message_is_refused() -> None:
    with pytest.raises(DecodeError):
        await WorkerSession().receive(b"\x12\x7f", unwelcome)
