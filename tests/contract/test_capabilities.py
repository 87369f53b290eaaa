"""What a worker cannot compute as it is meant is refused by name: no field is ignored by a worker that lacks it."""

from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor

from trunkline.capabilities import FIELDS, Capabilities, Needs, check_able, needs_of, unable
from trunkline.status import INVALID_REQUEST, RequestRefused
from trunkline.v1.generation_pb2 import SamplingParams
from trunkline.v1.worker_pb2 import (
    Adapter,
    BlockSource,
    Capability,
    GetModelResponse,
    Grammar,
    OutputKind,
    Submit,
    Task,
    Work,
)

PLAIN_FIELDS = 15  # of Submit: every worker of protocol 5 knows them
PLAIN = Capabilities.of(GetModelResponse())
ASKED: list[tuple[Submit, "Capability.ValueType", str]] = [
    (Submit(work=Work(adapter=Adapter(id="a"))), Capability.CAPABILITY_ADAPTERS, "adapter"),
    (Submit(work=Work(grammar=Grammar())), Capability.CAPABILITY_GRAMMARS, "grammar"),
    (Submit(work=Work(output=OutputKind.OUTPUT_KIND_VECTOR)), Capability.CAPABILITY_VECTORS, "output"),
    (Submit(work=Work(output=OutputKind.OUTPUT_KIND_SCORE)), Capability.CAPABILITY_SCORES, "output"),
    (Submit(block_sources=[BlockSource()]), Capability.CAPABILITY_FETCH, "block_sources"),
    (Submit(hand_over_after=1), Capability.CAPABILITY_HAND_OVER, "hand_over_after"),
]


def refused(submit: Submit, capabilities: Capabilities) -> RequestRefused:
    with pytest.raises(RequestRefused) as caught:
        check_able(submit, capabilities)
    assert caught.value.reason == INVALID_REQUEST
    return caught.value


@pytest.mark.parametrize(("submit", "needed", "field"), ASKED, ids=[field for _, _, field in ASKED])
def test_a_worker_refuses_by_name_what_it_does_not_list_and_takes_what_it_lists(
    submit: Submit, needed: "Capability.ValueType", field: str
) -> None:
    others: Needs = frozenset(Capability.values()) - {needed}
    for supported in (frozenset[Any](), others):
        error = refused(submit, Capabilities(Task.TASK_GENERATE, supported))
        assert error.field == field
        assert Capability.Name(needed).removeprefix("CAPABILITY_").lower() in error.message
    check_able(submit, Capabilities(Task.TASK_GENERATE, frozenset({needed})))


def set_field(message: Any, field: FieldDescriptor) -> None:
    """Sets a field to something that is not its default."""
    value = getattr(message, field.name)
    if field.message_type is not None:
        value.add() if field.is_repeated else value.SetInParent()
    else:
        setattr(message, field.name, 2)


def test_every_field_that_an_older_worker_does_not_know_has_a_refusal() -> None:
    made = []
    for field in Submit.DESCRIPTOR.fields:
        if field.number > PLAIN_FIELDS and field.name != "work":
            set_field(submit := Submit(), field)
            made.append(submit)
    for field in Work.DESCRIPTOR.fields:
        set_field(submit := Submit(), Submit.DESCRIPTOR.fields_by_name["work"])
        set_field(submit.work, field)
        made.append(submit)
    assert len(made) >= len(ASKED) - 1
    for submit in made:
        refused(submit, PLAIN)


def test_every_capability_has_a_field_to_blame() -> None:
    assert FIELDS.keys() == set(Capability.values()) - {Capability.CAPABILITY_UNSPECIFIED}
    everything = unable(frozenset(FIELDS), "no worker has it")
    assert "grammars, adapters, vectors, scores, tiers, fetch, hand_over" in everything.message


def test_a_plain_generation_needs_nothing_and_every_generating_worker_takes_it() -> None:
    for work in (Work(), Work(output=OutputKind.OUTPUT_KIND_TOKENS)):
        assert needs_of(work) == frozenset()
        check_able(Submit(work=work), PLAIN)
    check_able(Submit(sampling=SamplingParams(max_tokens=3), hand_over_after=0), PLAIN)


@pytest.mark.parametrize(
    "work", [Work(dimensions=4), Work(raw=True), Work(dimensions=4, output=OutputKind.OUTPUT_KIND_SCORE)]
)
def test_a_field_of_another_kind_of_output_is_refused_by_every_worker(work: Work) -> None:
    field = next(each.name for each, _ in work.ListFields() if each.name != "output")
    everything = Capabilities(Task.TASK_EMBED, frozenset(Capability.values()))
    assert refused(Submit(work=work), everything).field == field
    check_able(Submit(work=Work(dimensions=4, raw=True, output=OutputKind.OUTPUT_KIND_VECTOR)), everything)


@pytest.mark.parametrize("task", [Task.TASK_EMBED, Task.TASK_SCORE])
def test_a_model_for_another_task_does_not_generate(task: "Task.ValueType") -> None:
    can = Capabilities(task, frozenset({Capability.CAPABILITY_VECTORS}))
    assert refused(Submit(), can).field == "model"
    check_able(Submit(work=Work(output=OutputKind.OUTPUT_KIND_VECTOR)), can)


def test_a_sampling_parameter_of_a_newer_version_is_refused() -> None:
    check_able(submit := Submit(sampling=SamplingParams(seed=1, stop=["x"], logit_bias={1: 1.0})), PLAIN)
    submit.sampling.MergeFromString(b"\xfd\x07\x00\x00\x00\x3f")  # field 127: 0.5
    assert refused(submit, PLAIN).field == "sampling"


@pytest.mark.parametrize("inside", ["", "adapter", "grammar"])
def test_work_of_a_newer_version_is_refused_wherever_its_fields_are(inside: str) -> None:
    unknown = b"\xfa\x07\x01x"  # field 127
    work = Work()
    if inside:
        getattr(work, inside).MergeFromString(unknown)
    else:
        work.MergeFromString(unknown)
    everything = Capabilities(Task.TASK_GENERATE, frozenset(FIELDS))
    assert refused(Submit(work=work), everything).field == "work"
    assert refused(Submit(work=Work(output=9)), everything).field == "output"  # type: ignore[arg-type]
