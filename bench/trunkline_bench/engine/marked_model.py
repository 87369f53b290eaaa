"""A small model with random weights, whose tokenizer is the demo model's with more marks."""

import json
from collections.abc import Sequence
from pathlib import Path

from trunkline_bench.engine.random_model import RANDOM_22M, write_random_model
from trunkline_bench.servers.demo_model import DEMO_MODEL

CONFIG = {
    **RANDOM_22M,
    "vocab_size": 2112,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
}


def write_marked_model(
    directory: Path,
    template: str,
    *,
    specials: Sequence[str],
    words: Sequence[str],
    ends: Sequence[str],
    context_length: int,
) -> None:
    """Writes a model into a directory.

    template: of chats
    specials, words: tokens that are added, as special ones and as others
    ends: tokens that end an answer
    """
    tokenizer = json.loads((DEMO_MODEL / "tokenizer.json").read_text())
    base = len(tokenizer["model"]["vocab"])
    ids = {added["content"]: added["id"] for added in tokenizer["added_tokens"]}
    new = [mark for mark in (*specials, *words) if mark not in ids]
    ids |= {mark: base + place for place, mark in enumerate(new)}
    plain = tokenizer["added_tokens"][0]
    tokenizer["added_tokens"] += [
        {**plain, "id": ids[mark], "content": mark, "special": mark in specials} for mark in new
    ]
    end_ids = [ids[mark] for mark in ends]
    write_random_model(directory, {**CONFIG, "eos_token_id": end_ids, "max_position_embeddings": context_length})
    named = {"bos_token": "<s>", "eos_token": ends[0], "model_max_length": context_length}
    for name, contents in (("tokenizer", tokenizer), ("tokenizer_config", named)):
        (directory / f"{name}.json").write_text(json.dumps(contents))
    (directory / "chat_template.jinja").write_text(template)
