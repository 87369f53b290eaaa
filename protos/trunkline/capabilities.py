"""What a request needs a worker to be able to do beyond a plain generation, and what a worker can do. Pure.

This is the only place that relates fields of a submit to capabilities: routers place requests by it, workers refuse by
it. A field of Submit or Work that an older worker would ignore gets a capability here. Sampling parameters have none:
workers refuse those that they do not know.
"""

from dataclasses import dataclass

from google.protobuf.unknown_fields import UnknownFieldSet

from trunkline.status import RequestRefused, invalid
from trunkline.v1.worker_pb2 import Capability, GetModelResponse, OutputKind, Submit, Task, Work

Needs = frozenset["Capability.ValueType"]
NO_NEEDS: Needs = frozenset()
GENERATE = Task.TASK_GENERATE  # once: the enum looks up each name that it is asked for
TIERS: Needs = frozenset({Capability.CAPABILITY_TIERS})
GRAMMARS: Needs = frozenset({Capability.CAPABILITY_GRAMMARS})
# The field to blame if a capability is missing.
FIELDS: dict["Capability.ValueType", str] = {
    Capability.CAPABILITY_GRAMMARS: "grammar",
    Capability.CAPABILITY_ADAPTERS: "adapter",
    Capability.CAPABILITY_VECTORS: "output",
    Capability.CAPABILITY_SCORES: "output",
    Capability.CAPABILITY_TIERS: "tiers",
    Capability.CAPABILITY_FETCH: "block_sources",
    Capability.CAPABILITY_HAND_OVER: "hand_over_after",
}
_OF_OUTPUT = {
    OutputKind.OUTPUT_KIND_VECTOR: Capability.CAPABILITY_VECTORS,
    OutputKind.OUTPUT_KIND_SCORE: Capability.CAPABILITY_SCORES,
}


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a worker can do. Ours list it in their model's description; a worker of protocol 5 generates and no more."""

    task: "Task.ValueType"
    supported: Needs = NO_NEEDS

    @classmethod
    def of(cls, model: GetModelResponse) -> "Capabilities":
        return cls(model.task or GENERATE, frozenset(model.capabilities))

    def can(self, needs: Needs) -> bool:
        return needs <= self.supported


def needs_of(work: Work) -> Needs:
    """Returns the capabilities that a worker must have for this work; none for a plain generation."""
    needs = set()
    if work.HasField("grammar"):
        needs.add(Capability.CAPABILITY_GRAMMARS)
    if work.HasField("adapter"):
        needs.add(Capability.CAPABILITY_ADAPTERS)
    if work.output in _OF_OUTPUT:
        needs.add(_OF_OUTPUT[work.output])
    return frozenset(needs)


def check_able(submit: Submit, capabilities: Capabilities) -> None:
    """Raises RequestRefused (INVALID_REQUEST), naming the field, if a worker with these capabilities cannot compute the
    submit as it is meant."""
    if UnknownFieldSet(submit.sampling):
        raise invalid("sampling", "has parameters that this worker does not know")
    needs = NO_NEEDS
    if submit.HasField("work"):
        _check_known(submit.work)
        needs = needs_of(submit.work)
    if submit.block_sources:
        needs |= {Capability.CAPABILITY_FETCH}
    if submit.hand_over_after:
        needs |= {Capability.CAPABILITY_HAND_OVER}
    if submit.first_segment_tokens and submit.work.output not in _OF_OUTPUT:
        raise invalid("first_segment_tokens", "only the prompt of a vector or a score has segments")
    if not capabilities.can(needs):
        raise unable(needs - capabilities.supported, "this worker does not have")
    check_task(capabilities.task, submit.work)


def _check_known(work: Work) -> None:
    """Raises RequestRefused (INVALID_REQUEST) if a newer router asks for work of which this version knows nothing, or a
    field does not belong to the kind of output."""
    known = Work()
    known.CopyFrom(work)
    known.DiscardUnknownFields()
    if known.ByteSize() != work.ByteSize():
        raise invalid("work", "has fields that this worker does not know")
    if work.output not in OutputKind.values():
        raise invalid("output", f"{work.output} is no kind of output that this worker knows")
    if work.dimensions and work.output != OutputKind.OUTPUT_KIND_VECTOR:
        raise invalid("dimensions", "only a vector has them")
    if work.raw and work.output not in _OF_OUTPUT:
        raise invalid("raw", "only a vector or a score may be raw")


def unable(missing: Needs, who_lacks: str) -> RequestRefused:
    """The refusal (INVALID_REQUEST) for want of these capabilities.

    who_lacks: ends the sentence: "this worker does not have"
    """
    names = ", ".join(Capability.Name(one).removeprefix("CAPABILITY_").lower() for one in sorted(missing))
    return invalid(FIELDS[min(missing)], f"needs the capability {names}, which {who_lacks}")


def check_task(task: "Task.ValueType", work: Work | None) -> None:
    """Raises RequestRefused (INVALID_REQUEST) if the work is a generation, and the model has another task. Work with
    another output needs a capability instead."""
    if task != GENERATE and (work is None or work.output not in _OF_OUTPUT):
        raise invalid("model", f"the model does not generate text: its task is {name_of(task)}")


def name_of(task: "Task.ValueType") -> str:
    """The name of a task, which a newer worker may have given a value that this version does not know."""
    return Task.Name(task).removeprefix("TASK_").lower() if task in Task.values() else str(task)
