"""What an answer tells of its prompts: their text, their tokens, and the names of tokens.

All of it is found out once a request is admitted, from the tokens that the shared path has made: a prompt is tokenized
once, and a request that is refused costs no more than others.
"""

from array import array
from dataclasses import dataclass, field
from functools import partial

import orjson

from trunkline.status import invalid
from trunkline_router.edge.http_call import HttpCall
from trunkline_router.edge.long_lists import json_list
from trunkline_router.openai.logprobs import TokenNames
from trunkline_router.request.prepared_request import PreparedRequest
from trunkline_router.request.request_call import OnAdmission

MAX_PROMPT_LOGPROBS = 1 << 17  # of one body or event


@dataclass(slots=True)
class ToldPrompt:
    """What is told of one prompt. Parts that the answer does not need are empty.

    ids_json: its tokens, as JSON
    names: of all tokens; None if the answer needs none
    """

    text: str = ""
    token_ids: "array[int]" = field(default_factory=lambda: array("i"))
    ids_json: orjson.Fragment = field(default_factory=lambda: orjson.Fragment(b"[]"))
    names: TokenNames | None = None


class LogprobsBound:
    """Bounds the log-probabilities of prompt tokens in one body or event: to write one as JSON takes a microsecond and
    a half of the event loop.

    num_top: of each token, beside its own
    choices: how often they are written
    field: what is refused
    """

    def __init__(self, num_top: int, choices: int, field: str) -> None:
        self._per_token = choices * (num_top + 1)
        self._field = field
        self._num_tokens = 0

    def add(self, num_tokens: int) -> None:
        """Counts a prompt. Raises RequestRefused (INVALID_REQUEST) beyond MAX_PROMPT_LOGPROBS."""
        self._num_tokens += num_tokens
        if self._num_tokens * self._per_token > MAX_PROMPT_LOGPROBS:
            raise invalid(
                self._field, f"{self._num_tokens} prompt tokens have more than {MAX_PROMPT_LOGPROBS} log-probabilities"
            )


@dataclass(frozen=True, slots=True)
class Wishes:
    """What a request wants to be told."""

    names: bool = False
    token_ids: bool = False
    decoded: bool = False  # the text of a prompt that is given as tokens

    def on_admission(self, call: HttpCall, told: ToldPrompt, bound: LogprobsBound | None) -> OnAdmission | None:
        """Returns what fulfils the wishes for one prompt; None if there are none."""
        if not (self.names or self.token_ids or self.decoded or bound):
            return None
        return partial(self._tell, call, told, bound)

    async def _tell(
        self, call: HttpCall, told: ToldPrompt, bound: LogprobsBound | None, prepared: PreparedRequest
    ) -> None:
        told.token_ids = prepared.prompt
        if bound is not None:
            bound.add(len(prepared.prompt))
        pool, caller = await call.edge.inference.found(prepared.model, call.caller, None), call.caller
        if self.names:
            told.names = await pool.tokenizer.token_bytes()
        if self.token_ids:
            told.ids_json = await json_list(prepared.prompt)
        if self.decoded:
            utf8 = await pool.tokenizer.decode(
                prepared.prompt, keep_special=True, tenant=caller.tenant, weight=caller.terms.weight
            )
            told.text = utf8.decode()
