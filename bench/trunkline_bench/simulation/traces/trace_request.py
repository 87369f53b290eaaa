"""One request of a workload."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

FIRST_ID = 3  # token ids below are special


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request. `prompt` makes its tokens on demand, since those of a long trace do not fit in memory."""

    arrival_s: float  # since the first request of the trace
    prompt_tokens: int
    output_tokens: int
    prompt: Callable[[], list[int]]
    lane: str = "standard"
    tenant: str = ""
    conversation: str = ""  # id that all turns of a conversation share; empty: a single request


def random_prompt(seed: int, count: int, vocab_size: int) -> list[int]:
    """Random tokens that share no prefix with the prompts of other seeds."""
    draw = np.random.Generator(np.random.PCG64(seed))
    tokens: list[int] = draw.integers(FIRST_ID, vocab_size, count).tolist()
    return tokens
