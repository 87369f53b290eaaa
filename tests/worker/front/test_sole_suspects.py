"""Whether a request was alone among those that may have killed an engine, whatever names other clients give theirs."""

from hypothesis import given
from hypothesis import strategies as st

from tests.worker.front.front_rig import MODEL, PROMPT, TOKENIZER, Link, Reader
from trunkline.v1.generation_pb2 import SamplingParams
from trunkline.v1.worker_pb2 import SequenceOutput, Submit
from trunkline_worker.front.cache_mirror import CacheMirror
from trunkline_worker.front.front import Front


class SteppingLink(Link):
    """All that was submitted is in the step under way."""

    def in_flight(self) -> set[int]:
        return set(self.submitted)


def end_of(victims: list[Submit], others: list[Submit], *, are_proven: bool = False) -> list[SequenceOutput]:
    """What the victims are told when the engine dies. All come from one router, in one session."""
    front, reader, other = Front(MODEL, TOKENIZER, CacheMirror(1)), Reader(), Reader()
    front.connect(SteppingLink())

    def deliver(output: SequenceOutput) -> None:
        (reader if output.handle <= len(victims) else other)(output)

    for handle, request in enumerate([*victims, *others], start=1):
        request.handle = handle
        choice = front.submit(request, deliver)
        assert choice is not None
        choice.steps = int(are_proven and handle > len(victims))
    front.on_engine_death("a test")
    return reader.news


def submit(
    tenant: str, request_id: str, choice: int = 0, prompt: list[int] = PROMPT, *, suspect: bool = True
) -> Submit:
    return Submit(
        tenant=tenant,
        request_id=request_id,
        choice=choice,
        prompt_token_ids=prompt,
        sampling=SamplingParams(seed=1),
        suspect=suspect,
    )


names = st.sampled_from(["", "a", "b"])
foreign = st.builds(
    submit,
    names,
    names,
    st.integers(0, 1),
    st.sampled_from([PROMPT, [*PROMPT, 5]]),
    suspect=st.booleans(),
)


@given(tenant=names, request_id=names, others=st.lists(foreign, min_size=1, max_size=3))
async def test_no_request_is_convicted_for_another_one_whatever_that_is_called(
    tenant: str, request_id: str, others: list[Submit]
) -> None:
    """Where the other one has not shown to be harmless. Two choices of one request by every name are one request."""
    (news,) = end_of([submit(tenant, request_id)], others)
    is_one_request = [
        (other.tenant, other.request_id, len(other.prompt_token_ids)) == (tenant, request_id, len(PROMPT))
        for other in others
    ]
    numbers = [0, *(other.choice for other in others)]
    assert news.suspect
    assert news.sole_suspect == (all(is_one_request) and len(set(numbers)) == len(numbers))


async def test_the_request_that_kills_the_engine_beside_another_tenant_s_of_its_id_convicts_neither() -> None:
    victim, killer = submit("victim", "request-1"), submit("attacker", "request-1", suspect=False)
    assert not end_of([victim], [killer])[0].sole_suspect
    assert not end_of([submit("attacker", "request-1")], [submit("victim", "request-1", suspect=False)])[0].sole_suspect


async def test_a_suspect_is_alone_among_its_own_choices_and_beside_those_that_are_proven() -> None:
    choices = [submit("a", "request-1", number) for number in range(3)]
    assert all(news.sole_suspect for news in end_of(choices, []))
    beside = [submit("b", "request-1", suspect=False)]
    assert end_of([submit("a", "request-1")], beside, are_proven=True)[0].sole_suspect
