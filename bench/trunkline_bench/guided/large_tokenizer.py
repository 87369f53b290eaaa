"""A tokenizer.json of a tiktoken file, such as the wheel `dashscope` has of Qwen's 151,643 tokens."""

import base64
import json
from pathlib import Path

PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
END = "<|im_end|>"


def read_ranks(path: Path) -> dict[bytes, int]:
    """Token ids by their bytes."""
    lines = (line.split() for line in path.read_bytes().splitlines() if line)
    return {base64.b64decode(token): int(rank) for token, rank in lines}


def write_tokenizer(ranks: dict[bytes, int], path: Path) -> int:
    """Writes a tokenizer.json. Returns the id of END, the token that ends an output."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {byte: chr(byte) for byte in printable}
    letters |= {byte: chr(256 + n) for n, byte in enumerate(byte for byte in range(256) if byte not in letters)}

    def spelled(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    merges = [
        (spelled(token[:cut]), spelled(token[cut:]))
        for token, _ in sorted(ranks.items(), key=lambda item: item[1])
        for cut in sorted(
            (cut for cut in range(1, len(token)) if token[:cut] in ranks and token[cut:] in ranks),
            key=lambda cut: (ranks[token[:cut]], ranks[token[cut:]]),
        )
    ]
    specials = {text: len(ranks) + n for n, text in enumerate(("<|endoftext|>", "<|im_start|>", END))}
    split = {"type": "Split", "pattern": {"Regex": PATTERN}, "behavior": "Isolated", "invert": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    content = {
        "version": "1.0",
        "added_tokens": [
            {"id": token, "content": text, "special": True, "normalized": False}
            | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
            for text, token in specials.items()
        ],
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": {spelled(token): rank for token, rank in ranks.items()}, "merges": merges},
    }
    path.write_text(json.dumps(content))
    return specials[END]
