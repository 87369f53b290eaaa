"""Writes twenty samples of the demo model, from fixed seeds."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

TEMPERATURE = 0.7
TOP_P = 0.95
MAX_NEW_TOKENS = 700


@dataclass(frozen=True)
class Prompt:
    """The start of a sample: the beginning of a text, or the first message of a chat."""

    text: str
    chat: bool = False


PROMPTS: tuple[Prompt, ...] = (
    Prompt("Once upon a time"),
    Prompt("Once upon a time"),
    Prompt("Once upon a time"),
    Prompt("Once upon a time, there was a little dragon"),
    Prompt("Once upon a time, in a quiet village,"),
    Prompt("Long ago"),
    Prompt("There once lived"),
    Prompt("One rainy morning, Lily"),
    Prompt("Ben and his sister"),
    Prompt("The old owl"),
    Prompt("It was a cold winter night"),
    Prompt("The Lost Kite\n\n"),
    Prompt("Nora wanted to learn to swim."),
    Prompt("Far away, beyond the hills,"),
    Prompt("Tom had a red ball."),
    Prompt("Tell me a story about a fox.", chat=True),
    Prompt("Hello!", chat=True),
    Prompt("Tell me a short story about a robot.", chat=True),
    Prompt("Who are you?", chat=True),
    Prompt("Tell me a story about a girl named Ivy and a storm.", chat=True),
)


def sample(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, prompt: Prompt, seed: int) -> tuple[str, bool]:
    """Continue one prompt; returns the new text and whether the model ended it with an end token."""
    if prompt.chat:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt.text}], tokenize=False, add_generation_prompt=True
        )
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    else:
        ids = tokenizer(prompt.text, return_tensors="pt")["input_ids"]
    torch.manual_seed(seed)
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=True,
        temperature=TEMPERATURE,
        top_p=TOP_P,
        top_k=0,
        max_new_tokens=min(MAX_NEW_TOKENS, model.config.max_position_embeddings - ids.shape[1]),
        pad_token_id=tokenizer.eos_token_id,
    )[0, ids.shape[1] :]
    end_ids = model.generation_config.eos_token_id
    ended = int(output[-1]) in (end_ids if isinstance(end_ids, list) else [end_ids])
    return tokenizer.decode(output, skip_special_tokens=True), ended


def write(directory: Path) -> None:
    """Sample every prompt once and write `samples.md` into the directory of the model."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    # Sampling in float32 keeps the samples the same on processors with and without bfloat16 arithmetic.
    model = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    parts = [
        "# Samples\n\n"
        f"One sample for each prompt, none left out: temperature {TEMPERATURE}, top-p {TOP_P}, at most {MAX_NEW_TOKENS} "
        "new tokens, float32 on a CPU.\nThe prompt is in bold. `python deploy/demo/samples.py` makes this file again.\n"
    ]
    for seed, prompt in enumerate(PROMPTS, start=1):
        text, ended = sample(model, tokenizer, prompt, seed)
        state = "ended by itself" if ended else "cut off"
        kind = "chat" if prompt.chat else "text"
        joint = "\n\n" if prompt.chat or prompt.text.endswith("\n") else ""
        parts.append(
            f"## {seed}. {kind}, seed {seed}, {state}\n\n**{prompt.text.strip()}**{joint}{text.strip() if joint else text.rstrip()}\n"
        )
    (directory / "samples.md").write_text("\n".join(parts))


def main() -> None:
    """Sample the demo model and write `samples.md` beside it."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--model", type=Path, default=Path(__file__).parent / "tiny-tales")
    write(parser.parse_args().model)


if __name__ == "__main__":
    main()
