"""Prepares a client's request for workers: checks, defaults, tokens."""

import re
import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from trunkline.answer.answer_grammar import (
    LIMIT,
    STRUCTURAL_TAG,
    answer_grammar,
    check_choice,
    may_reason,
    must_call,
    needs_grammar,
)
from trunkline.answer.answer_parser import PARSERS, call_marks, reasoning_marks
from trunkline.answer.output_reader import NO_CONTEXT, AnswerContext
from trunkline.capabilities import GRAMMARS, NO_NEEDS, Needs, check_task, needs_of
from trunkline.names import grammar_digest, grammar_kind_name
from trunkline.sampling_params import BY_MODEL
from trunkline.status import CODE_NOT_FOUND, MODEL_NOT_FOUND, RequestRefused, invalid
from trunkline.v1.generation_pb2 import SamplingParams
from trunkline.v1.inference_pb2 import GenerateRequest
from trunkline.v1.worker_pb2 import GetModelResponse, Grammar, OutputKind, Work
from trunkline.validation import (
    TOKENS,
    WHOLE_OUTPUTS,
    check_dimensions,
    check_length,
    check_prompt_logprobs,
    max_total_tokens,
    validate_grammar,
    validate_sampling,
)
from trunkline_router.access.access import Caller, Scheduling
from trunkline_router.prompts.conversation import ASSISTANT, JOINT
from trunkline_router.prompts.reasoning_effort import FIELD as EFFORT
from trunkline_router.prompts.reasoning_effort import NO_EFFORT, effort_limit, knows_effort
from trunkline_router.prompts.token_ids import read_ids
from trunkline_router.prompts.tokenizer import PromptTokenizer
from trunkline_router.quotas.shared_state import SharedState
from trunkline_router.record.request_record import CHECKS, MODEL, TOKENIZER, Interval
from trunkline_router.request.inputs import Inputs, encode_inputs
from trunkline_router.request.request_call import PreparedRequest, RequestCall
from trunkline_router.workers.pool import Pool, Pools
from trunkline_runtime.telemetry.trace_context import random_int

MAX_CACHE_SALT_BYTES = 256
MOST_SHOWN = 128  # characters of a name in an error
MOST_PROMPT_END = 64  # characters: marks at the end of a prompt are shorter
NEVER = -100.0  # a bias of logits, the least
_SPACE = re.compile(r"\s*")


class ModelAliases:
    """Further names of served models, so that clients with a fixed model name can be served by another model."""

    def __init__(self, entries: Sequence[str] = ()) -> None:
        """Takes the aliases of --model-aliases, in which aliases_problem() has found no mistake."""
        pairs = [(name, model) for name, _, model in (entry.partition("=") for entry in entries)]
        self.exact = {name: model for name, model in pairs if not name.endswith("*")}  # alias → model
        prefixes = [(name[:-1], model) for name, model in pairs if name.endswith("*")]
        self._prefixes = sorted(prefixes, key=lambda pair: len(pair[0]), reverse=True)

    def model_of(self, name: str) -> str | None:
        """Returns the model that a name stands for; None if it is no alias. An exact name takes precedence over a
        prefix, and a longer prefix over a shorter one. An empty name is no alias."""
        if not name or name in self.exact:
            return self.exact.get(name)
        return next((model for prefix, model in self._prefixes if name.startswith(prefix)), None)


@dataclass(frozen=True, slots=True)
class Preparer:
    """Prepares the requests of a router: for Generate, Grant and ExplainRoute alike.

    enforces_calls: every call of a tool conforms to it, as if one of the request's tools were strict
    """

    pools: Pools
    shared: SharedState
    max_choices: int
    aliases: ModelAliases
    effort_limits: Mapping[str, int]  # tokens of reasoning
    enforces_calls: bool = False

    def served_name(self, model: str, caller: Caller) -> str:
        """Returns the name of the model that a client means: itself, unless it is an alias. A served model that the
        caller may use precedes an alias of the same name. Other callers must not learn that it is served."""
        target = self.aliases.model_of(model)
        is_model = self.pools.knows(model) and caller.may_use(model)
        return model if target is None or is_model else target

    async def pool(self, model: str, caller: Caller, time_left_s: float | None, *, needs: Needs = NO_NEEDS) -> Pool:
        """Returns the pool of a model, by its name or an alias; an empty name means the only one that the caller may
        use. Raises RequestRefused: FORBIDDEN, and as Pools.pool()."""
        served = self.served_name(model, caller)
        if model:
            caller.check_model(served, model)  # without a look for it: the answer must not tell whether it is served
        try:
            return await self.pools.found(served, caller.tenant, time_left_s, caller.identity.models, needs=needs)
        except RequestRefused as refused:
            if served == model or refused.reason != MODEL_NOT_FOUND:
                raise
            message = f"{model[:MOST_SHOWN]!r} is an alias: {refused.message}"
            raise RequestRefused(CODE_NOT_FOUND, MODEL_NOT_FOUND, message, field="model") from None

    def check_choices(self, choices: int, output: "OutputKind.ValueType" = TOKENS) -> None:
        """Raises RequestRefused (INVALID_REQUEST) unless one request may have so many choices. A prompt has one vector
        or score."""
        most = 1 if output in WHOLE_OUTPUTS else self.max_choices
        if not 1 <= choices <= most:
            raise invalid("n", f"{choices} is not in [1, {most}]")

    async def prepare(self, call: RequestCall) -> PreparedRequest:
        """Checks everything that the client sent, cheap checks first, and fills in every default. Raises
        RequestRefused."""
        if call.extras.inputs is not None:
            return await self._prepare_inputs(call, call.extras.inputs)
        request, record = call.request, call.record
        scheduling = _checked_scheduling(call)
        work = call.extras.work
        needs = _checked_needs(call, self.enforces_calls)
        pool = await self._searched(call, needs)
        record.model, record.stage = pool.name, CHECKS
        check_task(pool.task, work)
        scheduling = scheduling.corrected(self.shared.weight_factor(scheduling.tenant))
        affinity_key = call.affinity_key()
        limits = pool.limits
        output = TOKENS if work is None else work.output
        validate_sampling(
            request.sampling, vocab_size=limits.vocab_size, eos_token_ids=limits.eos_token_ids, output=output
        )
        choices = request.n if request.HasField("n") else 1
        self.check_choices(choices, output)
        begun_s = time.monotonic()
        try:
            prompt, rendered = await _prompt_tokens(call, pool.tokenizer, limits, scheduling)
        finally:
            record.tokenized = Interval(begun_s, time.monotonic())
        record.stage = CHECKS
        template, effort = pool.tokenizer.template, request.chat.reasoning_effort
        answer_format, answer_context, grammar = _answer_form(
            call,
            limits,
            rendered,
            template,
            enforces_calls=self.enforces_calls,
            most_reasoning=effort_limit(effort, template, self.effort_limits),
        )
        has_effect = effort in ("", NO_EFFORT) or knows_effort(template)
        has_effect = has_effect or may_reason(answer_format, answer_context.prompt_end, template)
        able = None if grammar is None else pool.able(needs | GRAMMARS)
        if grammar is not None and able is not None:
            work, needs, limits = _with_grammar(work, grammar), needs | GRAMMARS, able.limits
            record.grammar = record.grammar or grammar_kind_name(grammar.kind)
        elif grammar is not None and request.chat.HasField("max_reasoning_tokens"):
            raise invalid(LIMIT, f"needs the capability grammars, which no worker of model {pool.name} has")
        sampling = _fitted_sampling(request, limits, len(prompt))
        max_tokens = sampling.max_tokens if sampling.HasField("max_tokens") else None
        sampling.keep_marks |= bool(answer_format)
        if answer_format and request.chat.forbids_calls:
            for mark in call_marks(answer_format):
                if (token_id := await pool.tokenizer.token_of(mark)) is not None:
                    sampling.logit_bias[token_id] = NEVER
        record.prompt_tokens, record.choices = len(prompt), choices
        record.has_answers = any(message.role == ASSISTANT for message in request.chat.messages)
        record.sampling, record.is_seeded = sampling, request.sampling.HasField("seed")
        record.max_tokens = max_tokens
        return PreparedRequest(
            call.request_id,
            pool.name,
            prompt if isinstance(prompt, array) else array("i", prompt),
            sampling,
            choices,
            scheduling,
            most_output_tokens=max_total_tokens(limits) - len(prompt) if max_tokens is None else max_tokens,
            vocab_size=limits.vocab_size,
            tokenizer=pool.tokenizer,
            affinity_key=affinity_key,
            answer_format=answer_format,
            answer_context=answer_context,
            work=work,
            needs=needs,
            ignored_fields=() if has_effect else (EFFORT,),
        )

    async def _prepare_inputs(self, call: RequestCall, inputs: Inputs) -> PreparedRequest:
        """As prepare(), for vectors or scores: each input is the prompt of a choice without output tokens."""
        record, work = call.record, call.extras.work
        assert work is not None, "inputs without work"
        scheduling = _checked_scheduling(call)
        inputs.check()
        needs = needs_of(work)
        pool = await self._searched(call, needs)
        record.model, record.stage = pool.name, CHECKS
        scheduling = scheduling.corrected(self.shared.weight_factor(scheduling.tenant))
        check_dimensions(work.dimensions, pool.limits.pooling)
        affinity_key = call.affinity_key()
        begun_s, record.stage = time.monotonic(), TOKENIZER
        try:
            encoded = await encode_inputs(inputs, pool.tokenizer, pool.limits, scheduling.tenant)
        finally:
            record.tokenized = Interval(begun_s, time.monotonic())
        record.stage = CHECKS
        prepared = PreparedRequest(
            call.request_id,
            pool.name,
            encoded[0].ids,
            SamplingParams(max_tokens=0, seed=0),
            len(encoded),
            scheduling,
            most_output_tokens=0,
            vocab_size=pool.limits.vocab_size,
            tokenizer=pool.tokenizer,
            affinity_key=affinity_key,
            work=work,
            needs=needs,
            inputs=encoded,
        )
        record.prompt_tokens, record.choices, record.inputs = prepared.prompt_tokens, 1, len(encoded)
        return prepared

    async def _searched(self, call: RequestCall, needs: Needs) -> Pool:
        """As pool(), for the model that the request names; the record has the time of the search."""
        record, name = call.record, call.request.model
        served = self.served_name(name, call.caller)
        if self.pools.knows(served):
            record.model = served  # also of a request that finds no worker; clients may send any other name
        record.stage, begun_s = MODEL, time.monotonic()
        try:
            return await self.pool(name, call.caller, call.time_left(), needs=needs)
        finally:
            record.searched = Interval(begun_s, time.monotonic())


def _checked_scheduling(call: RequestCall) -> Scheduling:
    """Checks what needs no model: the request's id, salt and lane. Returns how it is scheduled. Raises
    RequestRefused."""
    request, record = call.request, call.record
    record.stage = CHECKS
    call.check_request_id()
    if len(request.cache_salt.encode()) > MAX_CACHE_SALT_BYTES:
        raise invalid("cache_salt", f"must have at most {MAX_CACHE_SALT_BYTES} bytes")
    scheduling = call.caller.scheduling(request.lane, request.cache_salt)
    record.lane = scheduling.lane_name
    return scheduling


def _checked_needs(call: RequestCall, enforces_calls: bool) -> Needs:
    """Returns what workers must be able to do. Raises RequestRefused if the request's grammar cannot be one, or does
    not go together with the rest, and if no tool can be called as the answer must."""
    request, work = call.request, call.extras.work
    needs = NO_NEEDS if work is None else needs_of(work)
    check_choice(request.chat)
    needs_masks = needs_grammar(request, enforces_calls=enforces_calls)
    if needs_masks and work is not None and work.output in WHOLE_OUTPUTS:
        raise invalid("grammar", f"constrains text, but the output is a {WHOLE_OUTPUTS[work.output]}")
    if request.HasField("grammar"):
        given = request.grammar
        validate_grammar(given)
        call.record.grammar = grammar_kind_name(given.kind)
        if given.digest:
            raise invalid("grammar", "the digest must be empty: routers compute it")
        if given.kind == STRUCTURAL_TAG and request.chat.tools and not must_call(request.chat):
            raise invalid("grammar", "a request with tools cannot have structural tags: leave one of them out")
    return needs | GRAMMARS if needs_masks else needs


def _with_grammar(work: Work | None, grammar: Grammar) -> Work:
    guided = Work(grammar=Grammar(digest=grammar_digest(grammar), kind=grammar.kind, text=grammar.text))
    if work is not None:
        guided.MergeFrom(work)
    return guided


def _fitted_sampling(request: GenerateRequest, limits: GetModelResponse, num_prompt: int) -> SamplingParams:
    """Returns the complete parameters, with a max_tokens that fits beside the prompt if the client asks for that.
    Raises RequestRefused if prompt and output, or the prompt's log-probabilities, are too long."""
    params, room = request.sampling, max_total_tokens(limits) - num_prompt
    has_limit = params.HasField("max_tokens") and not (request.fit_max_tokens and room > 0)
    check_length(
        num_prompt,
        params.max_tokens if has_limit else None,
        context_length=limits.context_length,
        capacity=limits.kv_token_capacity,
    )
    check_prompt_logprobs(params, num_prompt)
    sampling = resolve_sampling(params, limits.default_sampling)
    if request.fit_max_tokens and sampling.max_tokens > room:
        sampling.max_tokens = room
    return sampling


def _answer_form(
    call: RequestCall,
    limits: GetModelResponse,
    rendered: str,
    template: str,
    *,
    enforces_calls: bool,
    most_reasoning: int | None,
) -> tuple[str, AnswerContext, Grammar | None]:
    """Returns the model's format, in which the answer is parsed, what its parser knows, and the grammar of the answer.
    The format is "" if this router does not know it, if the prompt is not a conversation, because other prompts are
    continued as they are, or if the request's own grammar describes the whole answer as text. Raises RequestRefused
    (INVALID_REQUEST) if calls cannot be enforced.

    most_reasoning: tokens of reasoning that the request's effort allows
    """
    request = call.request
    answer_format = limits.answer_format if limits.answer_format in PARSERS and request.HasField("chat") else ""
    context = _answer_context(call, rendered, answer_format) if answer_format else NO_CONTEXT
    whole_of = partial(
        answer_grammar, request, answer_format, context.prompt_end, template, enforces_calls=enforces_calls
    )
    try:
        whole = whole_of(most_reasoning=most_reasoning)
    except RequestRefused:  # an effort is a hint: it is no reason to refuse a request
        if most_reasoning is None:
            raise
        whole = whole_of()
    if whole is not None or not request.HasField("grammar"):
        return answer_format, context, whole
    if request.grammar.kind == STRUCTURAL_TAG:
        return answer_format, context, request.grammar
    return "", NO_CONTEXT, request.grammar


def _answer_context(call: RequestCall, rendered: str, answer_format: str) -> AnswerContext:
    chat = call.request.chat
    prompt_end = rendered[-MOST_PROMPT_END:]
    if chat.continue_final_message:
        final = chat.messages[-1]
        text = JOINT.join(part.text for part in final.parts if part.HasField("text")) or final.content
        prompt_end = _open_mark(rendered, text, reasoning_marks(answer_format))
    elif chat.HasField("add_generation_prompt") and not chat.add_generation_prompt:
        prompt_end = ""  # it is the text of a message: no turn is open
    return AnswerContext(chat.tools, prompt_end, single_tool_call=chat.single_tool_call, text_stays=call.text_stays)


def _open_mark(rendered: str, final: str, marks: Mapping[str, str]) -> str:
    """Returns the mark that begins the reasoning in which a continued final message ends; "" if it ends in text. As in
    an answer, only white space and other reasoning may precede the mark. The template can have written it, too.

    marks: what begins reasoning, and what ends it
    """
    final = final.strip()
    before = rendered.rstrip().removesuffix(final).rstrip()
    written = next((begin for begin in marks if before.endswith(begin)), "")
    text, at = written + final, 0
    while begin := next((begin for begin in marks if text.startswith(begin, at)), ""):
        end = text.find(marks[begin], at + len(begin))
        if end < 0:
            return begin
        at = _SPACE.match(text, end + len(marks[begin])).end()  # type: ignore[union-attr]  # it always matches
    return ""


async def _prompt_tokens(
    call: RequestCall, tokenizer: PromptTokenizer, limits: GetModelResponse, scheduling: Scheduling
) -> tuple[Sequence[int], str]:
    """Returns the prompt's token ids, unchecked if there are too many for any worker, and the text of a conversation.
    Raises RequestRefused."""
    request, extras = call.request, call.extras
    kind = "token_ids" if extras.token_ids is not None else request.WhichOneof("prompt")
    if kind is None:
        raise invalid("prompt", "one of text, token_ids and chat must be set")
    most_tokens, rendered = max_total_tokens(limits), ""
    if kind == "token_ids":
        prompt: Sequence[int] = request.token_ids.ids if extras.token_ids is None else extras.token_ids
        if len(prompt) <= most_tokens:  # a longer prompt is refused for its length, so its ids need no check
            prompt = await read_ids(prompt, vocab_size=limits.vocab_size, field="token_ids")
    elif kind == "text":
        text = request.text  # each access makes a copy
        tokenizer.check_fits(text, most_tokens)
        call.record.stage = TOKENIZER
        prompt = await tokenizer.encode(text, special_tokens=extras.special_tokens, tenant=scheduling.tenant)
    else:
        call.record.stage = TOKENIZER
        rendered = await tokenizer.render_chat(request.chat, most_tokens, tenant=scheduling.tenant)
        prompt = await tokenizer.encode_rendered(rendered, tenant=scheduling.tenant)
    if not prompt:
        raise invalid(kind, "the prompt has no tokens")
    return prompt, rendered


def resolve_sampling(params: SamplingParams, defaults: SamplingParams) -> SamplingParams:
    """Returns the client's parameters, completed with the model's defaults and a seed. Unknown fields are dropped,
    because they have not been checked."""
    resolved = SamplingParams()
    resolved.CopyFrom(params)
    resolved.DiscardUnknownFields()
    for name in BY_MODEL:
        if not params.HasField(name) and defaults.HasField(name):  # type: ignore[arg-type]
            setattr(resolved, name, getattr(defaults, name))
    if not params.HasField("seed"):
        resolved.seed = random_int(63)  # clients in languages without unsigned integers can send it back
    return resolved
