"""From a validated Submit to a sequence of the engine."""

from collections.abc import Sequence as Tokens
from dataclasses import dataclass
from typing import Any

import numpy as np

from trunkline.v1.generation_pb2 import SamplingParams
from trunkline.v1.worker_pb2 import Submit
from trunkline_worker.cache.prefix_tree import PrefixTree
from trunkline_worker.cache.sequence import Sequence
from trunkline_worker.lanes.fair_share import Account
from trunkline_worker.step.plan import Sampling
from trunkline_worker.step.sampling_key import choice_seed

# Sampling at a lower temperature is greedy but for exact ties. As a float field carries it, in 32 bits.
LEAST_TEMPERATURE = float(np.float32(1e-5))


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt's tokens, and the tokens and digests of its full blocks if they are known already (simulation)."""

    token_ids: Tokens[int]
    packed: Tokens[bytes] = ()  # see Sequence.packed
    digests: Tokens[bytes] = ()


def sequence_of(
    submit: Submit,
    prompt: Prompt,
    *,
    tree: PrefixTree,
    account: Account,
    arrival: int,
    now_s: float,
    max_total: int,
    eos: frozenset[int],
) -> Sequence:
    """The sequence that a Submit describes, with a prompt that is passed beside it.

    max_total: bounds prompt and output together: the context length or the KV pool, whichever is smaller
    """
    deadline_s = now_s + submit.timeout.ToNanoseconds() / 1e9 if submit.HasField("timeout") else None
    return Sequence(
        sequence_id=submit.handle,
        token_ids=[*prompt.token_ids, *submit.resume.output_token_ids],
        prompt_len=len(prompt.token_ids),
        sampling=resolve_sampling(submit.sampling, submit.choice, max_total - len(prompt.token_ids), eos),
        root=tree.root(submit.cache_salt),
        arrival=arrival,
        account=account,
        arrival_s=now_s,
        deadline_s=deadline_s,
        packed=[*prompt.packed],
        digests=[*prompt.digests],
    )


def resolve_sampling(params: SamplingParams, choice: int, room: int, eos: frozenset[int]) -> Sampling:
    """Resolved parameters. Absent fields take their neutral value; routers have filled in the model's defaults."""

    def given(name: Any, otherwise: Any) -> Any:
        return getattr(params, name) if params.HasField(name) else otherwise

    stop = frozenset(params.stop_token_ids)
    temperature = given("temperature", 1.0)
    return Sampling(
        max_tokens=min(params.max_tokens, room) if params.HasField("max_tokens") else room,
        seed=choice_seed(params.seed, choice),
        temperature=0.0 if temperature < LEAST_TEMPERATURE else temperature,
        top_k=given("top_k", 0),
        top_p=given("top_p", 1.0),
        min_p=given("min_p", 0.0),
        repetition_penalty=given("repetition_penalty", 1.0),
        presence_penalty=given("presence_penalty", 0.0),
        frequency_penalty=given("frequency_penalty", 0.0),
        logit_bias=tuple(sorted(params.logit_bias.items())),
        min_tokens=params.min_tokens,
        end_token_ids=stop if params.ignore_eos else stop | eos,
        logprobs=given("logprobs", None),
        prompt_logprobs=given("prompt_logprobs", None),
    )
