"""docs/http.md, and what it says about tables in the code."""

import re
from pathlib import Path

from trunkline.sampling_params import MAX_TOP_LOGPROBS
from trunkline.status import (
    CONTEXT_LENGTH_EXCEEDED,
    DEADLINE_EXCEEDED,
    FORBIDDEN,
    INTERNAL,
    INVALID_REQUEST,
    MODEL_NOT_FOUND,
    NO_WORKER,
    OVERLOADED,
    QUARANTINED,
    QUOTA_EXCEEDED,
    REQUEST_NOT_FOUND,
    UNAUTHENTICATED,
    WORKER_NOT_FOUND,
)
from trunkline.validation import (
    MAX_LOGIT_BIAS,
    MAX_STOP_BYTES,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
)
from trunkline_router.edge.http.json_body import MAX_CONTAINERS, MAX_DEPTH, MAX_DIGITS, MAX_STRINGS, MAX_VALUES
from trunkline_router.edge.http.limits import HttpLimits
from trunkline_router.edge.http.server import HANDSHAKE_SHARE
from trunkline_router.edge.openai.completion_request import MAX_PROMPTS
from trunkline_router.edge.openai.completions import AT_ONCE
from trunkline_router.edge.openai.token_details import MAX_PROMPT_LOGPROBS
from trunkline_router.edge.request_fields import MAX_TEMPLATE_KWARGS_BYTES
from trunkline_router.edge.responses.response_request import MAX_METADATA_KEY, MAX_METADATA_PAIRS, MAX_METADATA_VALUE
from trunkline_router.prompts.conversation import MAX_MESSAGES, MAX_PARTS
from trunkline_router.prompts.tokenizer import MAX_CHAT_BYTES, MAX_TEXT_BYTES
from trunkline_router.record.error_statuses import (
    PAGE_FILE_NOT_FOUND,
    PREVIOUS_RESPONSE_NOT_FOUND,
    PROTOCOL,
    RESPONSE_NOT_FOUND,
    TABLE,
)
from trunkline_router.request.inputs import MAX_CHARACTERS, MAX_INPUTS

PAGE = Path(__file__).parents[2] / "docs" / "http.md"

SITUATIONS = {
    INVALID_REQUEST: "a wrong, unknown or unserved field",
    CONTEXT_LENGTH_EXCEEDED: "prompt and `max_tokens` do not fit the context or the KV pool",
    MODEL_NOT_FOUND: "unknown model",
    REQUEST_NOT_FOUND: "no recent request with this id, or it is another tenant's",
    PAGE_FILE_NOT_FOUND: "the live page has no such file",
    WORKER_NOT_FOUND: "no such worker",
    RESPONSE_NOT_FOUND: "no such stored response",
    PREVIOUS_RESPONSE_NOT_FOUND: "`previous_response_id` names no stored response",
    UNAUTHENTICATED: "no credentials, or wrong, expired or revoked ones",
    FORBIDDEN: "the credentials do not allow it",
    OVERLOADED: "a queue is full",
    QUOTA_EXCEEDED: "a quota is used up",
    NO_WORKER: "no worker can serve the request now",
    DEADLINE_EXCEEDED: "a deadline has passed",
    QUARANTINED: "the request has stopped two engines",
    INTERNAL: "a bug; the log explains it under the request's id",
}
OF_HTTP_ALONE = (RESPONSE_NOT_FOUND, PREVIOUS_RESPONSE_NOT_FOUND, PAGE_FILE_NOT_FOUND)
HTTP_SITUATIONS = {
    400: "not valid HTTP",
    404: "no such path",
    405: "the path has no such method",
    408: "headers or body took too long",
    413: "the body is too large",
    414: "the URL is too long",
    415: "a `Content-Encoding`: compressed bodies are not served",
    417: "an `Expect` that is not served",
    431: "too many or too large headers",
    501: "a `Transfer-Encoding` other than `chunked`",
}


def error_rows() -> list[str]:
    return [
        f"| {SITUATIONS[reason]} | {row.status} | `{row.code}` | `{row.type}` | `{row.anthropic_type}` | "
        f"{'—' if reason in OF_HTTP_ALONE else f'`{reason}`'} |"
        for reason, row in TABLE.items()
    ]


def protocol_rows() -> list[str]:
    return [f"| {status} | `{row.code}` | {HTTP_SITUATIONS[status]} |" for status, row in PROTOCOL.items()]


def limit_rows() -> list[str]:
    http = HttpLimits()
    rows = {
        "body": f"{http.max_body_bytes >> 20} MiB, which arrives within {http.body_s:g} s",
        "text; texts of a conversation": f"{MAX_TEXT_BYTES >> 20} MiB; {MAX_CHAT_BYTES >> 20} MiB",
        "messages of a conversation; parts and calls of all of them": f"{MAX_MESSAGES:,}; {MAX_PARTS:,}",
        "prompts of a completion": f"{MAX_PROMPTS}, of which {AT_ONCE} run at a time",
        "inputs of a request for vectors or scores; their texts, with the prompt or query of each": (
            f"{MAX_INPUTS:,}; {MAX_CHARACTERS:,} characters"
        ),
        "JSON: depth; lists and objects; strings; values; digits of numbers": (
            f"{MAX_DEPTH}; {MAX_CONTAINERS:,}; {MAX_STRINGS:,}; {MAX_VALUES:,}; {MAX_DIGITS:,}"
        ),
        "`chat_template_kwargs`": f"{MAX_TEMPLATE_KWARGS_BYTES >> 20} MiB",
        "stop strings; bytes of each; `stop_token_ids`": (
            f"{MAX_STOP_STRINGS}; {MAX_STOP_BYTES:,}; {MAX_STOP_TOKEN_IDS}"
        ),
        "`logprobs`, `top_logprobs`, `prompt_logprobs`": (
            f"{MAX_TOP_LOGPROBS}; in all {MAX_PROMPT_LOGPROBS:,} entries for the prompts of an answer, or of an event"
        ),
        "entries of `logit_bias`": f"{MAX_LOGIT_BIAS:,}",
        "`metadata` of a response": (
            f"{MAX_METADATA_PAIRS} pairs, names of {MAX_METADATA_KEY} and values of {MAX_METADATA_VALUE} characters"
        ),
        "URL": f"{http.max_url_bytes >> 10} KiB",
        "headers": (f"{http.max_headers}, {http.max_header_bytes >> 10} KiB, which arrive within {http.head_s:g} s"),
        "requests of a connection": (
            "one at a time; if the next one is sent before the response was read, it is not answered and the "
            "connection closes"
        ),
        "idle connection": f"`--http-keep-alive-s` ({http.keep_alive_s:g} s)",
        "unread output: a client that reads nothing of it is dropped": (
            f"after {http.unread_s:g} s; what is left when a connection closes must be read within that time over TLS, "
            "or if the client goes on sending"
        ),
        "TLS handshakes in progress": (f"1/{1 / HANDSHAKE_SHARE:g} of the connections, each for {http.head_s:g} s"),
    }
    return [f"| {what} | {limit} |" for what, limit in rows.items()]


def examples(page: Path) -> list[list[tuple[str, str]]]:
    """A page's blocks of commands, each a list of (command, what it prints)."""
    blocks = re.findall(r"```console\n(.*?)```", page.read_text(), re.DOTALL)
    return [_commands(block) for block in blocks]


def _commands(block: str) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for line in block.splitlines():
        if line.startswith("$ "):
            found.append((line.removeprefix("$ "), ""))
            continue
        command, printed = found[-1]
        if command.endswith("\\") and not printed:
            found[-1] = (f"{command}\n{line}", "")
        else:
            found[-1] = (command, f"{printed}{line}\n")
    return found
