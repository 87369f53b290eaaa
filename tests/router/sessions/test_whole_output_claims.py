"""Outputs that are no tokens: a vector or a score comes whole, once, and only for a choice that was to have it."""

import math
from array import array
from typing import Any

import pytest

from trunkline.v1.generation_pb2 import FinishReason, OutputChunk, PromptReport, SamplingParams, Score, Vector
from trunkline.v1.worker_pb2 import OutputKind, SequenceOutput, Submit, Work
from trunkline_router.workers.session import WorkerSession

TOKENS, VECTOR, SCORE = (
    OutputKind.OUTPUT_KIND_TOKENS,
    OutputKind.OUTPUT_KIND_VECTOR,
    OutputKind.OUTPUT_KIND_SCORE,
)

ABORT = FinishReason.FINISH_REASON_ABORT
TOO_MUCH = PromptReport(prompt_tokens=2, cached_tokens=3)


def vector(*values: float) -> Vector:
    return Vector(values=array("f", values).tobytes())


def told(kind: "OutputKind.ValueType", choice: int = 0, **said: Any) -> tuple[list[SequenceOutput], bool]:
    """What the sink of a choice gets of a worker's output, and whether the choice is still open."""
    session, heard = WorkerSession(vocab_size=50), list[SequenceOutput]()
    sampling = SamplingParams(max_tokens=6 if kind == TOKENS else 0)
    submit = Submit(choice=choice, prompt_token_ids=[1, 2], sampling=sampling, work=Work(output=kind))
    (handle,) = session.submit([submit], [heard.append])
    said = {"prompt": PromptReport(prompt_tokens=2), **said}
    session.outputs.hand_out_all([SequenceOutput(handle=handle, **said)])
    return heard, bool(session.num_open)


@pytest.mark.parametrize(
    ("kind", "said"), [(VECTOR, {"vector": vector(0.5, -1.0)}), (SCORE, {"score": Score(values=[0.25])})]
)
def test_a_whole_output_ends_its_choice(kind: "OutputKind.ValueType", said: dict[str, Any]) -> None:
    ((output,), is_open) = told(kind, **said)
    assert not output.HasField("error")
    assert output.WhichOneof("output") in said
    assert not is_open


def test_a_choice_without_tokens_may_be_aborted() -> None:
    ((output,), is_open) = told(VECTOR, chunk=OutputChunk(finish_reason=ABORT))
    assert not output.HasField("error")
    assert not is_open


@pytest.mark.parametrize(("asked", "num_values", "fits"), [(0, 3, True), (0, 2, False), (2, 2, True), (2, 3, False)])
def test_a_vector_has_as_many_components_as_were_asked_for(asked: int, num_values: int, fits: bool) -> None:
    session, heard = WorkerSession(vocab_size=50, dimensions=3), list[SequenceOutput]()
    work = Work(output=VECTOR, dimensions=asked)
    (handle,) = session.submit(
        [Submit(prompt_token_ids=[1], sampling=SamplingParams(max_tokens=0), work=work)], [heard.append]
    )
    session.outputs.hand_out_all([SequenceOutput(handle=handle, vector=vector(*[1.0] * num_values))])
    assert [output.HasField("error") for output in heard] == [not fits]


@pytest.mark.parametrize("kind", [TOKENS, VECTOR, SCORE])
@pytest.mark.parametrize("choice", [0, 1])
def test_what_only_a_newer_router_understands_is_passed_over(kind: "OutputKind.ValueType", choice: int) -> None:
    assert told(kind, choice, prompt=TOO_MUCH) == ([], True)


@pytest.mark.parametrize(
    ("kind", "choice", "said"),
    [
        (TOKENS, 0, {"vector": vector(1.0)}),
        (TOKENS, 1, {"vector": vector(1.0)}),
        (TOKENS, 0, {"score": Score(values=[1.0])}),
        (SCORE, 0, {"vector": vector(1.0)}),
        (VECTOR, 0, {"score": Score(values=[1.0])}),
        (VECTOR, 0, {"vector": vector()}),
        (VECTOR, 0, {"vector": vector(1.0, math.nan)}),
        (VECTOR, 0, {"vector": Vector(values=b"12345")}),
        (SCORE, 0, {"score": Score(values=[math.inf])}),
        (SCORE, 0, {"score": Score()}),
        (VECTOR, 0, {"vector": vector(1.0), "prompt": TOO_MUCH}),
        (SCORE, 0, {"score": Score(values=[1.0]), "prompt": TOO_MUCH}),
        (VECTOR, 0, {"chunk": OutputChunk(finish_reason=ABORT), "prompt": TOO_MUCH}),
        (VECTOR, 0, {"chunk": OutputChunk(finish_reason=ABORT, text="x")}),
        (VECTOR, 0, {"chunk": OutputChunk(token_ids=[1])}),
        (VECTOR, 0, {"chunk": OutputChunk(finish_reason=FinishReason.FINISH_REASON_STOP)}),
    ],
)
def test_other_outputs_end_the_choice_with_an_error(
    kind: "OutputKind.ValueType", choice: int, said: dict[str, Any]
) -> None:
    ((output,), is_open) = told(kind, choice, **said)
    assert "makes no sense" in output.error.message
    assert not is_open
