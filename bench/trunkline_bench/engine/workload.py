"""Requests whose lengths follow a production trace, scaled to what a small model can hold."""

import csv
import random
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """A random prompt, and the number of tokens to generate, ignoring end-of-sequence."""

    prompt: list[int]
    output_tokens: int


def azure_lengths(trace: Path) -> list[tuple[int, int]]:
    """(prompt tokens, output tokens) of each request in an Azure LLM inference trace, in order of arrival.

    Format: https://github.com/Azure/AzurePublicDataset, columns TIMESTAMP, ContextTokens, GeneratedTokens.
    """
    with trace.open(newline="") as file:
        return [(int(row["ContextTokens"]), int(row["GeneratedTokens"])) for row in csv.DictReader(file)]


def scaled_requests(
    lengths: list[tuple[int, int]], *, count: int, scale: float, context_length: int, vocab_size: int, seed: int
) -> list[BenchRequest]:
    """`count` requests drawn from the trace, both lengths multiplied by `scale` and cut to fit the context.

    The prompts are random tokens and share no prefixes, so the prefix cache has no effect.
    """
    draw = random.Random(seed)
    requests = []
    for prompt_len, output_len in draw.sample(lengths, count):
        output_tokens = max(1, min(round(output_len * scale), context_length // 2))
        prompt_tokens = max(1, min(round(prompt_len * scale), context_length - output_tokens))
        prompt = [draw.randrange(3, vocab_size) for _ in range(prompt_tokens)]
        requests.append(BenchRequest(prompt, output_tokens))
    return requests
