"""From what a client says to what workers are told: checks, defaults, tokens."""

import secrets
import string
import uuid
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trunkline.ledger import Ledger
from trunkline.metadata import SESSION_KEY, only_value
from trunkline.status import invalid
from trunkline.v1.generation_pb2 import Lane, SamplingParams
from trunkline.v1.inference_pb2 import GenerateRequest, PromptInfo
from trunkline.v1.worker_pb2 import GetModelResponse, Submit
from trunkline.validation import (
    check_length,
    check_prompt_logprobs,
    max_total_tokens,
    session_problem,
    validate_sampling,
)
from trunkline_router.prompts.token_ids import read_ids
from trunkline_router.prompts.tokenizer import PromptTokenizer
from trunkline_router.request.steps import give_way
from trunkline_router.request.tenants import Scheduling
from trunkline_router.routing.route_request import RouteRequest
from trunkline_router.workers.pool import Pool

MAX_REQUEST_ID = 128
DEFAULTED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
REQUEST_ID_CHARACTERS = frozenset(string.ascii_letters + string.digits + string.punctuation)


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request that can be sent to any worker of its model."""

    request_id: str
    model: str
    prompt: "array[int]"  # four bytes per token: it is kept to the request's end
    sampling: SamplingParams  # every default filled in, seed included
    choices: int
    scheduling: Scheduling
    most_output_tokens: int  # of a choice: max_tokens, or the room that the most capable worker has beside the prompt
    vocab_size: int
    session: str = ""  # requests with an equal one belong together

    @property
    def seed(self) -> int:
        return self.sampling.seed

    def prompt_info(self) -> PromptInfo:
        """What the client is told of it, as far as it is known before a worker has it."""
        return PromptInfo(model=self.model, prompt_tokens=len(self.prompt), seed=self.seed, lane=self.scheduling.lane)

    def least_room(self, num_output: int = 0) -> int:
        """Tokens that a worker must take to answer it, or to go on after that much output. Workers of one model may
        differ in memory."""
        wanted = self.sampling.max_tokens if self.sampling.HasField("max_tokens") else num_output + 1
        return len(self.prompt) + wanted

    def route_request(self, now_s: float, output: "array[int] | None" = None) -> RouteRequest:
        """For the routing policy; `output`: what it has said already."""
        lane = self.scheduling.lane - Lane.LANE_INTERACTIVE
        return RouteRequest(
            self.prompt if output is None else self.prompt + output,
            now_s,
            salt=self.scheduling.cache_salt,
            lane=lane,
            choices=self.choices,
            may_use_cache=not self.sampling.HasField("prompt_logprobs"),
            session=self.session,
        )

    def submits(
        self,
        choices: Iterable[tuple[int, Ledger]],
        *,
        timeout_ns: int | None,
        trace: tuple[str, str],
        prompt_known: bool = False,
        suspect: bool = False,
    ) -> list[Submit]:
        """One per choice, going on where its ledger ends. `prompt_known`: what is to be told of the prompt was told."""
        submits = []
        for choice, ledger in choices:
            submit = Submit(
                request_id=self.request_id,
                choice=choice,
                prompt_token_ids=self.prompt,
                sampling=self.sampling,
                resume=ledger.resume(),
                cache_salt=self.scheduling.cache_salt,
                traceparent=trace[0],
                tracestate=trace[1],
                lane=self.scheduling.lane,
                tenant=self.scheduling.tenant,
                tenant_weight=self.scheduling.weight,
                suspect=suspect,
            )
            if choice > 0 or prompt_known:
                submit.sampling.ClearField("prompt_logprobs")  # the same for every choice: computed once
            if timeout_ns is not None:
                submit.timeout.FromNanoseconds(timeout_ns)
            submits.append(submit)
        return submits


def request_id_of(request: GenerateRequest) -> str:
    """The client's own, or a new one where it gives none, or none that could stand in a log."""
    given = request.request_id
    return given if given and _can_be_logged(given) else uuid.uuid4().hex


def check_request_id(request: GenerateRequest) -> None:
    """Raises RequestRefused where the client's own cannot be used."""
    if not _can_be_logged(request.request_id):
        raise invalid("request_id", f"must be at most {MAX_REQUEST_ID} printable ASCII characters without spaces")


def _can_be_logged(request_id: str) -> bool:
    return len(request_id) <= MAX_REQUEST_ID and REQUEST_ID_CHARACTERS.issuperset(request_id)


def session_of(metadata: Iterable[tuple[str, str | bytes]] | None, tenant: str) -> str:
    """What a call's requests belong together by, one tenant's never with another's; "" where it names no session.

    Raises RequestRefused (INVALID_REQUEST).
    """
    session = only_value(metadata, SESSION_KEY)
    if problem := session_problem(session):
        raise invalid(SESSION_KEY, problem)
    return f"{tenant}\0{session}" if session else ""


async def prepare(
    request: GenerateRequest,
    request_id: str,
    pool: Pool,
    *,
    max_choices: int,
    scheduling: Scheduling,
    session: str = "",
) -> PreparedRequest:
    """Checks everything the client said; the cheap things first. Raises RequestRefused."""
    limits = pool.limits
    validate_sampling(request.sampling, vocab_size=limits.vocab_size, eos_token_ids=limits.eos_token_ids)
    choices = request.n if request.HasField("n") else 1
    if not 1 <= choices <= max_choices:
        raise invalid("n", f"{choices} is not in [1, {max_choices}]")
    prompt = await prompt_tokens(request, pool.tokenizer, limits, scheduling)
    check_length(
        len(prompt),
        request.sampling.max_tokens if request.sampling.HasField("max_tokens") else None,
        context_length=limits.context_length,
        capacity=limits.kv_token_capacity,
    )
    check_prompt_logprobs(request.sampling, len(prompt))
    sampling = resolve_sampling(request.sampling, limits.default_sampling)
    room = max_total_tokens(limits) - len(prompt)
    return PreparedRequest(
        request_id,
        pool.name,
        prompt if isinstance(prompt, array) else array("i", prompt),
        sampling,
        choices,
        scheduling,
        most_output_tokens=sampling.max_tokens if sampling.HasField("max_tokens") else room,
        vocab_size=limits.vocab_size,
        session=session,
    )


async def prompt_tokens(
    request: GenerateRequest, tokenizer: PromptTokenizer, limits: GetModelResponse, scheduling: Scheduling
) -> Sequence[int]:
    """The prompt's tokens; unchecked where there are too many for any worker. Raises RequestRefused."""
    kind = request.WhichOneof("prompt")
    if kind is None:
        raise invalid("prompt", "one of text, token_ids and chat must be set")
    most_tokens = max_total_tokens(limits)
    if kind == "token_ids":
        prompt: Sequence[int] = request.token_ids.ids
        if len(prompt) < most_tokens:  # others are refused for their length, and need not be read through
            prompt = await read_ids(prompt, vocab_size=limits.vocab_size, field="token_ids")
    elif kind == "text":
        text = request.text  # a copy each time that it is asked for
        if not text:
            raise invalid("text", "the prompt is empty")
        await give_way(len(text))
        tokenizer.check_fits(text, most_tokens)
        await give_way(len(text))
        prompt = await tokenizer.encode(text, tenant=scheduling.tenant, weight=scheduling.weight)
    else:
        prompt = await tokenizer.encode_chat(
            request.chat, most_tokens, tenant=scheduling.tenant, weight=scheduling.weight
        )
    if not prompt:
        raise invalid(kind, "the prompt has no tokens")
    return prompt


def resolve_sampling(params: SamplingParams, defaults: SamplingParams) -> SamplingParams:
    """The client's parameters with the model's defaults in the places it left open, and a seed. Fields that this
    version does not know have not been checked: no worker gets them."""
    resolved = SamplingParams()
    resolved.CopyFrom(params)
    resolved.DiscardUnknownFields()
    for name in DEFAULTED:
        if not params.HasField(name) and defaults.HasField(name):  # type: ignore[arg-type]
            setattr(resolved, name, getattr(defaults, name))
    if not params.HasField("seed"):
        resolved.seed = secrets.randbits(63)  # 63: clients in languages without unsigned integers can give it back
    return resolved
