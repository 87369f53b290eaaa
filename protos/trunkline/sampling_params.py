"""The table of sampling parameters, which all code reads that lists, checks or passes on parameters.

`Sampling` declares each parameter once: its type, and the rest as a `Parameter`. From it follow the ranges in
validation.py, the defaults that models may set, the fields of JSON bodies, the flags of `trunkline generate` and the
keywords of the clients. A parameter that is also a field of `SamplingNumbers` reaches the engine's sampler without
further code.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum, auto
from typing import Annotated, Any, TypedDict, get_args, get_type_hints

MAX_TOP_LOGPROBS = 20
# 0.01 as a 32-bit float field carries it. With smaller penalties every token seen would be certain or impossible.
LEAST_REPETITION_PENALTY: float = struct.unpack("<f", struct.pack("<f", 0.01))[0]


class Http(Enum):
    """Which JSON bodies have a field with a parameter's name and meaning because of the table."""

    ALL = auto()  # completions, chat completions, responses and messages
    OPENAI = auto()  # all but messages
    NONE = auto()  # bodies declare fields of their own for it


@dataclass(frozen=True, slots=True)
class Parameter:
    """What the table says of a parameter."""

    help: str  # a phrase in lower case
    # The range of a float: [least, most], or (least, most]. Of an int only `most` counts.
    least: float | None = None
    most: float | None = None
    least_is_excluded: bool = False
    example: Any = None  # a valid value other than the default, for the warm-up of engines and for tests
    http: Http = Http.NONE
    by_model: bool = False  # whether the model's generation_config.json may set the default
    kind: Any = None  # float, int, bool, …: from the annotation


class Sampling(TypedDict, total=False):
    """The fields of SamplingParams (generation.proto). None leaves a field unset."""

    temperature: Annotated[
        float | None,
        Parameter("divides the logits; 0: greedy", 0.0, 100.0, example=0.5, http=Http.ALL, by_model=True),
    ]
    top_p: Annotated[
        float | None,
        Parameter(
            "keeps the likeliest tokens that reach this probability together", 0.0, 1.0, least_is_excluded=True,
            example=0.5, http=Http.ALL, by_model=True,
        ),
    ]  # fmt: skip
    top_k: Annotated[
        int | None,
        Parameter("keeps this many of the likeliest tokens; 0: all", example=3, http=Http.ALL, by_model=True),
    ]
    min_p: Annotated[
        float | None,
        Parameter(
            "drops tokens less likely than this share of the likeliest one", 0.0, 1.0,
            example=0.125, http=Http.ALL, by_model=True,
        ),
    ]  # fmt: skip
    repetition_penalty: Annotated[
        float | None,
        Parameter(
            "makes tokens of prompt and output less likely", LEAST_REPETITION_PENALTY, 10.0,
            example=1.5, http=Http.ALL, by_model=True,
        ),
    ]  # fmt: skip
    seed: Annotated[int | None, Parameter("makes sampling repeatable", example=5, http=Http.ALL)]
    min_tokens: Annotated[
        int | None, Parameter("tokens of output before anything may end it", example=2, http=Http.ALL)
    ]
    ignore_eos: Annotated[bool | None, Parameter("continue past end-of-sequence tokens", example=True, http=Http.ALL)]
    stop_token_ids: Annotated[Sequence[int] | None, Parameter("tokens that end the output", example=[3], http=Http.ALL)]
    presence_penalty: Annotated[
        float | None,
        Parameter("subtracted from the logits of tokens of the output", -2.0, 2.0, example=0.5, http=Http.OPENAI),
    ]
    frequency_penalty: Annotated[
        float | None,
        Parameter(
            "subtracted from the logits of tokens of the output, once for each time that they occur", -2.0, 2.0,
            example=0.25, http=Http.OPENAI,
        ),
    ]  # fmt: skip
    logit_bias: Annotated[
        Mapping[int, float] | None, Parameter("added to tokens' logits", example={5: 1.5}, http=Http.OPENAI)
    ]
    max_tokens: Annotated[int | None, Parameter("most tokens of output", example=7)]
    stop: Annotated[Sequence[str] | None, Parameter("texts that end the output", example=["END"])]
    logprobs: Annotated[
        int | None,
        Parameter("likeliest tokens to list beside each token of the output", most=MAX_TOP_LOGPROBS, example=2),
    ]
    prompt_logprobs: Annotated[
        int | None,
        Parameter("likeliest tokens to list beside each token of the prompt", most=MAX_TOP_LOGPROBS, example=1),
    ]
    include_stop: Annotated[bool | None, Parameter("keep the text that ended the output", example=True)]
    keep_special_tokens: Annotated[bool | None, Parameter("keep the text of special tokens", example=True)]
    keep_marks: Annotated[
        bool | None, Parameter("keep the text of special tokens that mark reasoning and tool calls", example=True)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingNumbers:
    """The parameters from which an engine's sampler computes, as they are in a request. The defaults are neutral: an
    absent parameter has no effect. A parameter here is an `optional` field of SamplingParams."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0


def _table() -> dict[str, Parameter]:
    found = {}
    for name, hint in get_type_hints(Sampling, include_extras=True).items():
        optional, parameter = get_args(hint)
        found[name] = replace(parameter, kind=get_args(optional)[0])
    return found


TABLE = _table()  # by name, in the order in which bodies are checked
NUMBERS = tuple(field.name for field in fields(SamplingNumbers))
NEUTRAL = SamplingNumbers()
EXAMPLES = {name: TABLE[name].example for name in NUMBERS}
# The parameters for which the model's default counts if a client sets none.
BY_MODEL = tuple(name for name, parameter in TABLE.items() if parameter.by_model)
