"""Checks a Submit before it reaches the engine. A router is trusted no more than a client."""

from trunkline.status import deadline_exceeded, invalid
from trunkline.v1.worker_pb2 import GetModelResponse, Submit
from trunkline.validation import (
    check_length,
    check_prompt_logprobs,
    max_total_tokens,
    validate_sampling,
    validate_scheduling,
    validate_token_ids,
)


def validate_submit(submit: Submit, model: GetModelResponse) -> None:
    """Raises RequestRefused, with the reason from the error table, if the submit is invalid or its timeout has
    passed."""
    if not submit.prompt_token_ids:
        raise invalid("prompt_token_ids", "the prompt is empty")
    validate_token_ids(submit.prompt_token_ids, vocab_size=model.vocab_size, field="prompt_token_ids")
    validate_scheduling(submit.lane, submit.tenant, submit.tenant_weight)
    validate_sampling(submit.sampling, vocab_size=model.vocab_size, eos_token_ids=model.eos_token_ids)
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
