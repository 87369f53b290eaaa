"""Validation of requests, by routers and again, as submits, by workers: SamplingParams, tokens, names and lengths."""

import math
from collections.abc import Collection, Sequence

from trunkline.capabilities import Capabilities, check_able
from trunkline.names import grammar_kind_name, lane_name
from trunkline.sampling_params import TABLE
from trunkline.status import context_exceeded, deadline_exceeded, invalid
from trunkline.v1.generation_pb2 import Lane, SamplingParams
from trunkline.v1.worker_pb2 import GetModelResponse, Grammar, GrammarKind, OutputKind, PoolingModel, Submit

MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIAS = 1024
MAX_GRAMMAR_BYTES = 256 << 10  # of text: a worker that takes grammars keeps at least so much for each session
MAX_PROMPT_LOGPROBS = 1 << 20  # entries of one prompt, about 14 bytes each: one message carries all

# Outputs that a prompt has as a whole instead of tokens, by kind: their names in the messages that carry them.
WHOLE_OUTPUTS: dict["OutputKind.ValueType", str] = {
    OutputKind.OUTPUT_KIND_VECTOR: "vector",
    OutputKind.OUTPUT_KIND_SCORE: "score",
}
TOKENS = OutputKind.OUTPUT_KIND_TOKENS  # once: the enum looks up each name that it is asked for
GRAMMAR_KINDS = {grammar_kind_name(kind): kind for kind in GrammarKind.values() if kind}
LANES = {lane_name(lane): lane for lane in Lane.values() if lane}  # by their names in files and flags
MAX_TENANT_BYTES, MAX_SESSION_BYTES = 128, 256
LEAST_TENANT_WEIGHT, MOST_TENANT_WEIGHT = 0.001, 1000.0

# name → (least, most, whether the least is excluded); name → most
_FLOATS = {
    name: (row.least, row.most, row.least_is_excluded)
    for name, row in TABLE.items()
    if row.least is not None and row.most is not None
}
_COUNTS = {name: row.most for name, row in TABLE.items() if row.kind is int and row.most is not None}


def tenant_problem(tenant: str) -> str | None:
    """Why the name of a tenant is not allowed; None if it is. Requests without a tenant have the empty name."""
    return _name_problem(tenant, MAX_TENANT_BYTES)


def session_problem(session: str) -> str | None:
    """Why the name of a session is not allowed; None if it is."""
    return _name_problem(session, MAX_SESSION_BYTES)


def _name_problem(name: str, most_bytes: int) -> str | None:
    if len(name) <= most_bytes and name.isascii() and name.isprintable():
        return None
    return f"must be at most {most_bytes} bytes of printable ASCII"


def validate_scheduling(lane: int, tenant: str, weight: float) -> None:
    """Raises RequestRefused (INVALID_REQUEST) that names the first invalid field. A weight of 0 means it is absent."""
    if lane not in Lane.values():
        raise invalid("lane", f"{lane} is not a lane; allowed: {', '.join(Lane.keys()[1:])}")
    if problem := tenant_problem(tenant):
        raise invalid("tenant", problem)
    if weight and not LEAST_TENANT_WEIGHT <= weight <= MOST_TENANT_WEIGHT:
        raise invalid("tenant_weight", f"{weight} is out of range [{LEAST_TENANT_WEIGHT:g}, {MOST_TENANT_WEIGHT:g}]")


def validate_sampling(
    params: SamplingParams,
    *,
    vocab_size: int,
    eos_token_ids: Collection[int] = (),
    output: "OutputKind.ValueType" = TOKENS,
    prefix: str = "sampling",
) -> None:
    """Raises RequestRefused (INVALID_REQUEST) that names the first invalid field.

    eos_token_ids: the model's end-of-sequence tokens, each below vocab_size
    output: what the parameters are for. A whole output has max_tokens 0, so whatever counts tokens need not know it.
    """
    for name, (least, most, excluded) in _FLOATS.items():
        if params.HasField(name):  # type: ignore[arg-type]
            value = getattr(params, name)
            # These comparisons are false for NaN.
            if not ((value > least if excluded else value >= least) and value <= most):
                raise invalid(f"{prefix}.{name}", f"{value:g} is not in {'(' if excluded else '['}{least:g}, {most:g}]")
    _validate_num_tokens(params, output, prefix)
    for name, most in _COUNTS.items():
        if params.HasField(name) and getattr(params, name) > most:  # type: ignore[arg-type]
            raise invalid(f"{prefix}.{name}", f"{getattr(params, name)} is more than {most}")
    _validate_stop(params, prefix)
    _at_most(len(params.stop_token_ids), MAX_STOP_TOKEN_IDS, f"{prefix}.stop_token_ids")
    validate_token_ids(params.stop_token_ids, vocab_size=vocab_size, field=f"{prefix}.stop_token_ids")
    if params.min_tokens and vocab_size <= MAX_STOP_TOKEN_IDS + len(eos_token_ids):
        ends = set(params.stop_token_ids) if params.ignore_eos else {*params.stop_token_ids, *eos_token_ids}
        if len(ends) >= vocab_size:
            raise invalid(f"{prefix}.min_tokens", "every token of the vocabulary would end the output")
    _at_most(len(params.logit_bias), MAX_LOGIT_BIAS, f"{prefix}.logit_bias")
    validate_token_ids(params.logit_bias, vocab_size=vocab_size, field=f"{prefix}.logit_bias")
    for token_id, bias in params.logit_bias.items():
        if not -100.0 <= bias <= 100.0 or math.isnan(bias):
            raise invalid(f"{prefix}.logit_bias", f"the bias {bias} of token {token_id} is not in [-100, 100]")


def validate_token_ids(token_ids: Collection[int], *, vocab_size: int, field: str, first_index: int = 0) -> None:
    """Raises RequestRefused (INVALID_REQUEST) that names the first id outside [0, vocab_size).

    first_index: the index of token_ids[0] in the field, if token_ids is only a part of the field
    """
    if not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size):  # several times faster than a loop
        return
    for index, token_id in enumerate(token_ids, first_index):
        if not 0 <= token_id < vocab_size:
            raise invalid(field, f"token id {token_id} at index {index} is not in [0, {vocab_size})")


def validate_grammar(grammar: Grammar) -> None:
    """Raises RequestRefused (INVALID_REQUEST) unless the kind is known and the text neither empty nor too long. Whether
    the text is a grammar is found out when it is compiled."""
    if grammar.kind not in GRAMMAR_KINDS.values():
        raise invalid("grammar", f"{grammar.kind} is not a known kind; allowed: {', '.join(GRAMMAR_KINDS)}")
    if not 1 <= (num_bytes := len(grammar.text.encode())) <= MAX_GRAMMAR_BYTES:
        raise invalid("grammar", f"the text has {num_bytes} bytes, not 1 to {MAX_GRAMMAR_BYTES}")


def max_total_tokens(model: GetModelResponse) -> int:
    """Most tokens of prompt and output together."""
    return min(model.context_length, model.kv_token_capacity)


def context_words(most_tokens: int) -> str:
    """How refusals name the limit. Clients look for these words: litellm, opencode, Claude Code and Qwen Code do."""
    return f"this model's maximum context length is {most_tokens} tokens"


def check_length(num_prompt: int, max_tokens: int | None, *, context_length: int, capacity: int) -> None:
    """Raises RequestRefused (CONTEXT_LENGTH_EXCEEDED) if prompt and output can never fit.

    max_tokens: None: at least 1. A prompt may fill the context if it is 0.
    """
    limit = min(context_length, capacity)
    most_prompt = limit - (max_tokens != 0)
    limit_words = context_words(limit)
    if capacity < context_length:
        limit_words += " on this server, whose KV pool can hold no more"
    if num_prompt > most_prompt:
        # Anthropic's words, in which Claude Code and Qwen Code read by how much they must shorten a conversation.
        raise context_exceeded(f"{limit_words}; prompt is too long: {num_prompt} tokens > {most_prompt} maximum")
    if max_tokens is not None and num_prompt + max_tokens > limit:
        raise context_exceeded(
            f"{limit_words}; prompt ({num_prompt}) and max_tokens ({max_tokens}) make {num_prompt + max_tokens}",
            field="sampling.max_tokens",
        )


def check_prompt_logprobs(params: SamplingParams, num_prompt: int, prefix: str = "sampling") -> None:
    """Raises RequestRefused (INVALID_REQUEST) if the prompt's log-probabilities do not fit into one message."""
    if params.HasField("prompt_logprobs") and num_prompt * (params.prompt_logprobs + 1) > MAX_PROMPT_LOGPROBS:
        most = MAX_PROMPT_LOGPROBS // num_prompt - 1
        raise invalid(f"{prefix}.prompt_logprobs", f"at most {most} for a prompt of {num_prompt} tokens")


def _validate_num_tokens(params: SamplingParams, output: "OutputKind.ValueType", prefix: str) -> None:
    has_limit = params.HasField("max_tokens")
    if output in WHOLE_OUTPUTS and not (has_limit and params.max_tokens == 0):
        raise invalid(f"{prefix}.max_tokens", f"must be 0: the output is a {WHOLE_OUTPUTS[output]}")
    if has_limit and params.max_tokens < 1 and output not in WHOLE_OUTPUTS:
        raise invalid(f"{prefix}.max_tokens", "must be at least 1")
    if has_limit and params.min_tokens > params.max_tokens:
        raise invalid(f"{prefix}.min_tokens", f"{params.min_tokens} is more than max_tokens {params.max_tokens}")


def check_dimensions(dimensions: int, model: PoolingModel) -> None:
    """Raises RequestRefused (INVALID_REQUEST) unless the model offers vectors of so many components; 0: all."""
    most = model.dimensions
    if dimensions in (0, most, *model.offered_dimensions) or (model.any_dimensions and 0 < dimensions < most):
        return
    if not most:
        raise invalid("dimensions", "only a vector has dimensions, and this model computes scores")
    others = ", ".join(map(str, model.offered_dimensions))
    offered = f"1 to {most}" if model.any_dimensions else f"{others} and {most}" if others else f"{most} alone"
    raise invalid("dimensions", f"{dimensions} is not offered by this model, which has {offered}")


def validate_submit(submit: Submit, model: GetModelResponse, capabilities: Capabilities) -> None:
    """What a worker checks, because a router is trusted no more than a client. Raises RequestRefused, with the reason
    from the error table, if the submit is invalid, asks for what the worker cannot do, or its timeout has passed."""
    check_able(submit, capabilities)
    if submit.work.dimensions:
        check_dimensions(submit.work.dimensions, model.pooling)
    if not submit.prompt_token_ids:
        raise invalid("prompt_token_ids", "the prompt is empty")
    validate_token_ids(submit.prompt_token_ids, vocab_size=model.vocab_size, field="prompt_token_ids")
    if submit.first_segment_tokens > len(submit.prompt_token_ids):
        raise invalid("first_segment_tokens", "the prompt has fewer tokens")
    if submit.first_segment_tokens and model.pooling.takes_no_pairs:
        raise invalid("first_segment_tokens", "the model has no template for a query and a document")
    validate_scheduling(submit.lane, submit.tenant, submit.tenant_weight)
    validate_sampling(
        submit.sampling,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        output=submit.work.output,
    )
    if not submit.sampling.HasField("seed"):
        raise invalid("sampling.seed", "must be set in a submit")
    check_length(
        len(submit.prompt_token_ids),
        submit.sampling.max_tokens if submit.sampling.HasField("max_tokens") else None,
        context_length=model.context_length,
        capacity=model.kv_token_capacity,
    )
    check_prompt_logprobs(submit.sampling, len(submit.prompt_token_ids))
    ledger = submit.resume.output_token_ids
    validate_token_ids(ledger, vocab_size=model.vocab_size, field="resume.output_token_ids")
    if len(submit.prompt_token_ids) + len(ledger) > max_total_tokens(model):
        raise invalid("resume.output_token_ids", f"{len(ledger)} tokens are more than can have been generated")
    if submit.sampling.HasField("max_tokens") and len(ledger) > submit.sampling.max_tokens:
        raise invalid("resume.output_token_ids", f"{len(ledger)} tokens are more than max_tokens")
    if submit.HasField("timeout") and submit.timeout.ToNanoseconds() <= 0:
        raise deadline_exceeded()


def _validate_stop(params: SamplingParams, prefix: str) -> None:
    stop: Sequence[str] = params.stop
    _at_most(len(stop), MAX_STOP_STRINGS, f"{prefix}.stop")
    for index, text in enumerate(stop):
        if not 1 <= len(text.encode()) <= MAX_STOP_BYTES:
            raise invalid(
                f"{prefix}.stop", f"stop string {index} has {len(text.encode())} bytes, not 1 to {MAX_STOP_BYTES}"
            )


def _at_most(count: int, most: int, field: str) -> None:
    if count > most:
        raise invalid(field, f"{count} entries are more than {most}")
