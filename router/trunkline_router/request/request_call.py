"""A client's request: as it came, with its caller (RequestCall), and checked and complete (PreparedRequest)."""

import string
from array import array
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from trunkline.answer.output_reader import NO_CONTEXT, AnswerContext
from trunkline.capabilities import NO_NEEDS, Needs
from trunkline.ledger import Ledger
from trunkline.names import SESSION_KEY, only_value
from trunkline.status import invalid
from trunkline.v1.generation_pb2 import Lane, SamplingParams
from trunkline.v1.inference_pb2 import GenerateRequest, PromptInfo
from trunkline.v1.worker_pb2 import Submit, Work
from trunkline.validation import session_problem
from trunkline_router.access.access import Access, Caller, Context, Metadata, Scheduling
from trunkline_router.prompts.tokenizer import EncodedInput, PromptTokenizer
from trunkline_router.record.request_record import GRPC, RequestRecord
from trunkline_router.request.failover import Computation
from trunkline_router.request.inputs import Inputs
from trunkline_router.routing.route_request import RouteRequest
from trunkline_runtime.telemetry.trace_context import TraceContext, new_request_id

FIRST_LANE = Lane.LANE_INTERACTIVE  # once: the enum looks up each name that it is asked for


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request that can be sent to any worker of its model that has the capabilities it needs."""

    request_id: str
    model: str
    prompt: "array[int]"  # four bytes a token: it is kept until the request ends
    sampling: SamplingParams  # every default filled in, seed included
    choices: int
    scheduling: Scheduling
    most_output_tokens: int  # of a choice: max_tokens, or what the largest worker can hold after the prompt
    vocab_size: int
    tokenizer: PromptTokenizer
    affinity_key: str = ""  # equal for requests of one conversation; "": none
    answer_format: str = ""  # in which the parts of the answer are found; "": it is text
    answer_context: AnswerContext = NO_CONTEXT  # for answer_format
    work: Work | None = None  # None: a plain generation
    needs: Needs = NO_NEEDS  # capabilities, for `work`
    # Of a request for vectors or scores: each is the prompt of a choice, and `prompt` is that of the first. None: all
    # choices have `prompt`.
    inputs: Sequence[EncodedInput] = ()
    ignored_fields: Sequence[str] = ()  # of the client's request, that have no effect with this model

    @property
    def seed(self) -> int:
        return self.sampling.seed

    @property
    def computation(self) -> Computation:
        """What it may be convicted for."""
        return next(self.computations())

    def computations(self) -> Iterator[Computation]:
        """What it may be convicted for: of several inputs each by itself."""
        work_bytes, grammar = b"", b""
        if self.work is not None:
            work = Work()
            work.CopyFrom(self.work)
            work.ClearField("grammar")
            work_bytes, grammar = work.SerializeToString(deterministic=True), self.work.grammar.digest
        for prompt in [one.ids for one in self.inputs] or [self.prompt]:
            yield Computation(self.scheduling.tenant, self.model, prompt, work_bytes, grammar)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt, or of all inputs."""
        return sum([len(one.ids) for one in self.inputs]) if self.inputs else len(self.prompt)

    def prompt_info(self) -> PromptInfo:
        """Returns what the client is told of the prompt, as far as it is known before a worker has it."""
        return PromptInfo(
            model=self.model,
            prompt_tokens=self.prompt_tokens,
            seed=self.seed,
            lane=self.scheduling.lane,
            answer_format=self.answer_format,
            prompt_end=self.answer_context.prompt_end,
            ignored_fields=self.ignored_fields,
            truncated_tokens=cut if any(cut := [one.num_cut for one in self.inputs]) else (),
        )

    def least_room(self, num_output: int = 0) -> int:
        """Returns how many tokens a worker must be able to hold to answer the request, or to continue it after
        `num_output` tokens. Workers of one model may differ in memory."""
        if self.inputs:
            return max([len(one.ids) for one in self.inputs])
        wanted = self.sampling.max_tokens if self.sampling.HasField("max_tokens") else num_output + 1
        return len(self.prompt) + wanted

    def route_request(self, now_s: float, output: "array[int] | None" = None) -> RouteRequest:
        """Returns the request for the routing policy; `output`: tokens generated so far."""
        lane, work = self.scheduling.lane - FIRST_LANE, self.work
        return RouteRequest(
            self.prompt if output is None else self.prompt + output,
            now_s,
            salt=self.scheduling.cache_salt,
            lane=lane,
            choices=1 if self.inputs else self.choices,  # inputs need no places among those that generate
            may_use_cache=not self.sampling.HasField("prompt_logprobs"),
            affinity_key=self.affinity_key,
            adapter=("", "") if work is None else (work.adapter.id, work.adapter.version),
            beside_prompts=max(0, len(self.inputs) - 1),
            beside_tokens=self.prompt_tokens - len(self.prompt),
        )

    def submits(
        self,
        choices: Iterable[tuple[int, Ledger]],
        *,
        timeout_ns: int | None,
        trace: TraceContext,
        previous_traceparent: str = "",
        prompt_known: bool = False,
        suspect: bool = False,
    ) -> list[Submit]:
        """Returns one Submit per choice, which continues where its ledger ends.

        trace: of the attempt's span. previous_traceparent: of the attempt before; "": there was none
        prompt_known: the prompt's report has arrived already; suspect: the request may have killed a worker
        """
        submits, traceparent = [], trace.traceparent
        for choice, ledger in choices:
            submit = Submit(
                request_id=self.request_id,
                choice=choice,
                prompt_token_ids=self.prompt if not self.inputs else self.inputs[choice].ids,
                sampling=self.sampling,
                resume=ledger.resume(),
                cache_salt=self.scheduling.cache_salt,
                traceparent=traceparent,
                tracestate=trace.tracestate,
                lane=self.scheduling.lane,
                tenant=self.scheduling.tenant,
                tenant_weight=self.scheduling.weight,
                suspect=suspect,
                work=self.work,
            )
            if self.inputs:
                submit.first_segment_tokens = self.inputs[choice].first_segment
            if previous_traceparent and submit.HasField("resume"):
                submit.resume.traceparent = previous_traceparent
            if choice > 0 or prompt_known:
                submit.sampling.ClearField("prompt_logprobs")  # the same for every choice, so computed once
            if timeout_ns is not None:
                submit.timeout.FromNanoseconds(timeout_ns)
            submits.append(submit)
        return submits


MAX_REQUEST_ID = 128
REQUEST_ID_CHARACTERS = frozenset(string.ascii_letters + string.digits + string.punctuation)

OnAdmission = Callable[[PreparedRequest], Awaitable[None]]
TimeLeft = Callable[[], float | None]  # seconds until the request's deadline; None: it has no deadline


@dataclass(frozen=True, slots=True)
class Extras:
    """What a protocol may ask of the shared path beside a GenerateRequest.

    token_ids: the prompt, in place of the request's: to put a million ids into a message would hold the event loop
    special_tokens: a prompt that is a text gets the model's special tokens
    on_admission: called once the request is within its tenant's quotas, before a worker gets it; may refuse it, and
        then nothing is charged
    work: what workers compute, if it is not a plain generation
    inputs: in place of a prompt, if `work` asks for vectors or scores
    """

    token_ids: "array[int] | None" = None
    special_tokens: bool = True
    on_admission: OnAdmission | None = None
    work: Work | None = None
    inputs: Inputs | None = None


NO_EXTRAS = Extras()


@dataclass(frozen=True, slots=True)
class RequestCall:
    """A request and the call that brought it, over any protocol.

    metadata: the call's metadata or headers, with names in lower case
    record: what became of the request so far
    text_stays: as in AnswerContext
    """

    request: GenerateRequest
    record: RequestRecord
    caller: Caller
    metadata: Metadata
    time_left: TimeLeft
    extras: Extras = NO_EXTRAS
    text_stays: bool = False

    @classmethod
    def of(
        cls, request: GenerateRequest, context: Context, access: Access, rpc: str, extras: Extras = NO_EXTRAS
    ) -> "RequestCall":
        """Returns the request of a call of `rpc` (its full name)."""
        caller, metadata = access.admitted(), context.invocation_metadata()
        record = RequestRecord(request_id_of(request), protocol=GRPC, endpoint=rpc)
        return cls(request, record, caller, metadata, context.time_remaining, extras)

    @property
    def request_id(self) -> str:
        """The client's; a new one if the client sets none, or one that cannot be logged."""
        return self.record.request_id

    def check_request_id(self) -> None:
        """Raises RequestRefused (INVALID_REQUEST) if the client's request id cannot be logged."""
        if not _can_be_logged(self.request.request_id):
            raise invalid("request_id", f"must be at most {MAX_REQUEST_ID} printable ASCII characters without spaces")

    def affinity_key(self) -> str:
        """Returns a key that is equal for requests of one tenant and one session, "" if the call names no session.

        Raises RequestRefused (INVALID_REQUEST).
        """
        session = only_value(self.metadata, SESSION_KEY)
        if problem := session_problem(session):
            raise invalid(SESSION_KEY, problem)
        return f"{self.caller.tenant}\0{session}" if session else ""


def request_id_of(request: GenerateRequest) -> str:
    """Returns the request's own id, or a new one if it has none or one that cannot be logged."""
    given = request.request_id
    return given if given and _can_be_logged(given) else new_request_id()


def _can_be_logged(request_id: str) -> bool:
    return len(request_id) <= MAX_REQUEST_ID and REQUEST_ID_CHARACTERS.issuperset(request_id)
