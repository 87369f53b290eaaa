"""What makes two requests the same one for a conviction: what is computed, and not how it is said."""

from array import array

import pytest

from tests.router.cluster import cluster
from tests.router.fake_worker import FakeWorker
from trunkline.status import QUARANTINED, RequestRefused
from trunkline.v1.generation_pb2 import SamplingParams
from trunkline_router.request.prepare import resolve_sampling
from trunkline_router.request.suspicion import Quarantine

PROMPT = array("i", [1, 2, 3])
UNKNOWN_FIELD = bytes([0xC0, 0x3E, 7])  # number 1000, a varint
DEFAULTS = SamplingParams(temperature=0.6, top_k=20)


def is_refused(sampling: SamplingParams, *, convicted: SamplingParams) -> bool:
    quarantine = Quarantine()
    quarantine.convict("acme", "tiny", PROMPT, resolve_sampling(convicted, DEFAULTS), 0.0)
    try:
        quarantine.check("acme", "tiny", PROMPT, resolve_sampling(sampling, DEFAULTS), 1.0)
    except RequestRefused as refused:
        return refused.reason == QUARANTINED
    return False


@pytest.mark.parametrize(
    "said",
    [
        SamplingParams(),
        SamplingParams(max_tokens=9, seed=7, temperature=0.1),
        SamplingParams(frequency_penalty=0.0),
        SamplingParams(presence_penalty=-0.0),
        SamplingParams(repetition_penalty=1.0),
        SamplingParams(logit_bias={7: 0.0, 8: -0.0}),
        SamplingParams.FromString(UNKNOWN_FIELD),
    ],
    ids=["the same", "sizes and randomness", "frequency", "presence", "repetition", "bias", "unknown field"],
)
def test_what_changes_nothing_that_is_computed_makes_no_other_request(said: SamplingParams) -> None:
    assert is_refused(said, convicted=SamplingParams())
    assert is_refused(SamplingParams(), convicted=said)


@pytest.mark.parametrize(
    "said",
    [
        SamplingParams(frequency_penalty=0.5),
        SamplingParams(repetition_penalty=1.1),
        SamplingParams(logit_bias={7: 1.0}),
        SamplingParams(logprobs=0),
        SamplingParams(prompt_logprobs=0),
    ],
    ids=["frequency", "repetition", "bias", "log-probabilities", "the prompt's"],
)
def test_what_is_computed_beside_or_done_to_the_logits_makes_another_one(said: SamplingParams) -> None:
    assert not is_refused(said, convicted=SamplingParams())


async def test_workers_do_not_get_fields_that_their_router_does_not_know() -> None:
    worker = FakeWorker("a")
    async with cluster(worker) as router:
        sampling = SamplingParams.FromString(SamplingParams(max_tokens=3).SerializeToString() + UNKNOWN_FIELD)
        assert UNKNOWN_FIELD in sampling.SerializeToString()
        await router.answer([1, 2, 3], sampling=sampling)
    (submit,) = worker.submits
    assert submit.sampling.max_tokens == 3
    assert UNKNOWN_FIELD not in submit.sampling.SerializeToString()
