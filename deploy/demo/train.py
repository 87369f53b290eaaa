"""Trains the demo model from scratch: corpus, tokenizer, model, model card and samples, all from one seed."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

import samples
import tokenizers
import torch
import transformers
from corpus import Document, documents
from plots import PLOTS
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

BOS, EOS, END = "<s>", "</s>", "<|end|>"
ROLES = ("system", "user", "assistant")
SPECIAL_TOKENS = [BOS, EOS, END, *(f"<|{role}|>" for role in ROLES)]
CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
{%- if message['role'] not in ['system', 'user', 'assistant'] -%}
{{- raise_exception('This model knows the roles system, user and assistant, not ' + message['role']) -}}
{%- endif -%}
{{- '<|' + message['role'] + '|>' + (message['content'] | trim) + '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|assistant|>' -}}
{%- endif -%}
"""
HELD_OUT_ROWS = 64


@dataclass(frozen=True)
class Phase:
    """A stretch of training at one sequence length."""

    steps: int
    rows: int
    length: int

    @property
    def tokens(self) -> int:
        """Tokens seen in this phase."""
        return self.steps * self.rows * self.length


@dataclass(frozen=True)
class Recipe:
    """All settings that determine the result of a training run."""

    seed: int
    phases: tuple[Phase, ...]
    vocabulary: int = 2048
    tokenizer_documents: int = 6000
    hidden: int = 256
    intermediate: int = 640
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    context: int = 1024
    peak_rate: float = 3e-3
    final_rate: float = 3e-5
    warmup_steps: int = 100
    weight_decay: float = 0.1
    threads: int = 2

    @property
    def steps(self) -> int:
        """Optimiser steps in all phases."""
        return sum(phase.steps for phase in self.phases)

    def rate(self, step: int) -> float:
        """Learning rate at a step: linear warmup, then a cosine."""
        if step < self.warmup_steps:
            return self.peak_rate * (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        return self.final_rate + (self.peak_rate - self.final_rate) * 0.5 * (1 + math.cos(math.pi * progress))


def render(document: Document) -> str:
    """Write a document with its special tokens, without the BOS that the tokenizer adds."""
    chat = "".join(f"<|{message.role}|>{message.content}{END}" for message in document.messages)
    return chat + document.text + EOS


def train_tokenizer(recipe: Recipe) -> PreTrainedTokenizerFast:
    """Train the byte-level BPE tokenizer on documents from a seed of its own."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=recipe.vocabulary,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    stream = documents(recipe.seed + 1)
    texts = (
        text
        for _, document in zip(range(recipe.tokenizer_documents), stream, strict=False)
        for text in (document.text, *(message.content for message in document.messages))
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A",
        pair=f"{BOS} $A {BOS} $B",
        special_tokens=[(BOS, tokenizer.token_to_id(BOS))],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        additional_special_tokens=[END, *(f"<|{role}|>" for role in ROLES)],
        model_max_length=recipe.context,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


class Rows:
    """Cuts a stream of documents into rows of equal length. Each row starts at the beginning of a document."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, seed: int, skip: frozenset[int] = frozenset()) -> None:
        self._tokenizer = tokenizer
        self._documents = documents(seed)
        self._skip = skip
        self.seen: set[int] = set()

    def _ids(self) -> Iterator[list[int]]:
        while True:
            text = render(next(self._documents))
            key = hash(text)
            self.seen.add(key)
            if key not in self._skip:
                yield self._tokenizer(text, verbose=False)["input_ids"]

    def row(self, length: int) -> list[int]:
        """Fill one row with whole documents; only the last of them may be cut off."""
        row: list[int] = []
        for ids in self._ids():
            row += ids
            if len(row) >= length:
                break
        return row[:length]

    def batch(self, rows: int, length: int) -> Tensor:
        """Fill a batch of rows, with one token more than the model reads so that each has a successor."""
        return torch.tensor([self.row(length + 1) for _ in range(rows)])


def token_losses(model: LlamaForCausalLM, batch: Tensor) -> Tensor:
    """Cross entropy of every token of a batch given the tokens before it: [rows, columns - 1]."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(input_ids=batch[:, :-1], use_cache=False).logits
    losses = cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten(), reduction="none")
    return losses.view(batch.shape[0], -1)


def train(recipe: Recipe, model: LlamaForCausalLM, rows: Rows) -> float:
    """Run all phases; returns the mean loss of the last hundred steps."""
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    plain = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": recipe.weight_decay}, {"params": plain, "weight_decay": 0.0}],
        lr=recipe.peak_rate,
        betas=(0.9, 0.95),
        fused=True,
    )
    model.train()
    step = 0
    recent: list[float] = []
    started = time.monotonic()
    remaining = sum(phase.tokens for phase in recipe.phases)
    done = 0
    for phase in recipe.phases:
        print(f"phase: {phase.steps} steps of {phase.rows} rows x {phase.length} tokens", flush=True)
        for _ in range(phase.steps):
            for group in optimizer.param_groups:
                group["lr"] = recipe.rate(step)
            loss = token_losses(model, rows.batch(phase.rows, phase.length)).mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            recent = [*recent[-99:], loss.item()]
            step += 1
            done += phase.rows * phase.length
            if step % 50 == 0 or step == recipe.steps:
                speed = done / (time.monotonic() - started)
                print(
                    f"step {step}/{recipe.steps}  loss {sum(recent[-50:]) / len(recent[-50:]):.3f}  "
                    f"{speed:,.0f} tokens/s  {(remaining - done) / speed / 60:.1f} min left",
                    flush=True,
                )
    return sum(recent) / len(recent)


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, rows: Rows, context: int) -> tuple[float, list[float]]:
    """Mean loss on documents that were not trained on, over all positions and over each quarter of the context."""
    model.eval()
    losses = torch.cat([token_losses(model, rows.batch(4, context)) for _ in range(HELD_OUT_ROWS // 4)])
    return losses.mean().item(), [quarter.mean().item() for quarter in losses.chunk(4, dim=1)]


def processor_name() -> str:
    """Name of the CPU if the system reports one, otherwise of the architecture."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def write_tokenizer(tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    """Save the tokenizer with the class name that all libraries recognize."""
    tokenizer.save_pretrained(directory)
    path = directory / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    config["add_bos_token"] = True
    path.write_text(json.dumps(config, indent=2) + "\n")


def write_card(directory: Path, recipe: Recipe, facts: dict[str, object]) -> None:
    """Write the model card."""
    quarters = facts["held_out_loss_by_quarter_of_context"]
    assert isinstance(quarters, list)
    phases = ", then ".join(f"{phase.steps} steps of {phase.rows} x {phase.length} tokens" for phase in recipe.phases)
    (directory / "README.md").write_text(
        f"""\
---
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: text-generation
---

# tiny-tales

A very small language model that tells children's tales. With it the server can run a real model anywhere, immediately
and without a download. It knows nothing else: it is a demonstration, not an assistant.

| | |
| --- | --- |
| Architecture | Llama (`LlamaForCausalLM`), {recipe.layers} layers, hidden {recipe.hidden}, intermediate \
{recipe.intermediate}, {recipe.heads} query heads and {recipe.kv_heads} key/value heads of dimension 64, tied embeddings |
| Parameters | {facts["parameters"]:,} in bfloat16 |
| Vocabulary | {facts["vocabulary"]:,} tokens, byte-level BPE, trained on the same corpus |
| Context | {recipe.context} tokens, all of them trained |
| Held-out loss | **{facts["held_out_loss"]:.4f}** nats per token (perplexity {facts["held_out_perplexity"]:.3f}) |
| Held-out loss by quarter of the context | {", ".join(f"{quarter:.4f}" for quarter in quarters)} |
| Training loss | {facts["training_loss"]:.4f} (mean of the last 100 steps) |
| Trained | {facts["date"]}, {facts["training_tokens"]:,} tokens in {recipe.steps} steps, \
{facts["seconds"] / 60:.1f} minutes in all |
| Machine | {facts["machine"]}, {recipe.threads} threads, no accelerator |
| Licence | Apache-2.0 |

## Corpus

All text is made by a grammar written for this model (`deploy/demo/corpus.py` and the modules beside it): tales with
consistent characters, things and places in {facts["plots"]} plots, chains of tales long enough to fill the context, and
chats in which a user asks for a tale, asks about a tale, greets, or asks a simple question. No text is copied from
elsewhere. Training reads a fresh stream and sees almost every document once. The held-out documents come from another
seed of the same grammar, without the few (mostly greetings) that also occur in training. So the loss measures how
well the model has learnt the grammar, not its English in general.

## Training

    python deploy/demo/train.py

AdamW (peak rate {recipe.peak_rate:g}, cosine to {recipe.final_rate:g}, weight decay {recipe.weight_decay:g}, \
clipping at 1.0), bfloat16 autocast, seed {recipe.seed}:
{phases}. The number of steps is fixed, so a run repeats on the same machine and versions; other
processors round differently. `training.json` holds the figures of this run.

## Use

The tokenizer adds `{BOS}` at the start. A tale ends with `{EOS}`. A chat is
`{BOS}<|user|>Tell me a story about a fox.{END}<|assistant|>`, and the answer ends with `{END}` (`chat_template.jinja`).
`samples.md` holds {len(samples.PROMPTS)} samples with their seeds; `python deploy/demo/samples.py` makes them again.
"""
    )


def main() -> None:
    """Train the demo model and write it with its model card and samples."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "tiny-tales")
    parser.add_argument("--seed", type=int, default=2026)
    parser.add_argument("--steps", type=int, default=3000, help="optimiser steps in all; fewer for a trial")
    arguments = parser.parse_args()

    long_steps = arguments.steps // 4
    recipe = Recipe(
        seed=arguments.seed,
        phases=(Phase(arguments.steps - long_steps, 8, 512), Phase(long_steps, 4, 1024)),
    )
    started = time.monotonic()
    torch.manual_seed(recipe.seed)
    torch.set_num_threads(recipe.threads)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # filling makes training a fifth slower

    tokenizer = train_tokenizer(recipe)
    print(f"tokenizer: {len(tokenizer)} tokens, {time.monotonic() - started:.0f} s", flush=True)
    end_ids = [tokenizer.convert_tokens_to_ids(token) for token in (EOS, END)]
    config = LlamaConfig(
        vocab_size=math.ceil(len(tokenizer) / 64) * 64,
        hidden_size=recipe.hidden,
        intermediate_size=recipe.intermediate,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        head_dim=recipe.hidden // recipe.heads,
        max_position_embeddings=recipe.context,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=None,
    )
    model = LlamaForCausalLM(config)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"model: {parameters:,} parameters", flush=True)

    rows = Rows(tokenizer, recipe.seed)
    training_loss = train(recipe, model, rows)

    arguments.output.mkdir(parents=True, exist_ok=True)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=end_ids, do_sample=True, temperature=0.7, top_p=0.95
    )
    model.to(torch.bfloat16).save_pretrained(arguments.output)
    write_tokenizer(tokenizer, arguments.output)

    shipped = LlamaForCausalLM.from_pretrained(arguments.output, dtype=torch.bfloat16)
    held_out = Rows(tokenizer, recipe.seed + 2, skip=frozenset(rows.seen))
    loss, quarters = held_out_loss(shipped, held_out, recipe.context)
    print(f"held-out loss {loss:.4f}, perplexity {math.exp(loss):.3f}", flush=True)
    samples.write(arguments.output)

    facts: dict[str, object] = {
        "date": date.today().isoformat(),
        "seed": recipe.seed,
        "parameters": parameters,
        "vocabulary": len(tokenizer),
        "plots": len(PLOTS),
        "training_steps": recipe.steps,
        "training_tokens": sum(phase.tokens for phase in recipe.phases),
        "training_documents": len(rows.seen),
        "training_loss": training_loss,
        "held_out_tokens": HELD_OUT_ROWS * recipe.context,
        "held_out_loss": loss,
        "held_out_perplexity": math.exp(loss),
        "held_out_loss_by_quarter_of_context": quarters,
        "seconds": time.monotonic() - started,
        "machine": f"{processor_name()} ({os.cpu_count()} cores)",
        "recipe": asdict(recipe),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "tokenizers": tokenizers.__version__,
        },
    }
    (arguments.output / "training.json").write_text(json.dumps(facts, indent=2) + "\n")
    write_card(arguments.output, recipe, facts)
    size = sum(path.stat().st_size for path in arguments.output.iterdir())
    print(f"wrote {arguments.output}: {size / 1e6:.2f} MB, {time.monotonic() - started:.0f} s in all", flush=True)


if __name__ == "__main__":
    main()
