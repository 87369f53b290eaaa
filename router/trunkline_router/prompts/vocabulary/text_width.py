"""How much text one token can stand for. With this bound, a text that cannot fit into a context is refused without
being tokenized.

Most tokenizers of language models keep every byte of a text in its tokens, so the longest token of the vocabulary is
the bound. There is no bound if a component drops or merges text (by collapsing whitespace, or by turning words into one
unknown token) or is not known here.
"""

from typing import Any

from tokenizers import Tokenizer, pre_tokenizers

from trunkline_router.prompts.vocabulary.components import parts_of

# Composing normal forms merge at most four characters into one (U+1F82 decomposes into that many).
SHRINKS = {"NFC": 4, "NFKC": 4, "NFD": 1, "NFKD": 1, "Prepend": 1}
CUTS_WITHOUT_LOSS = {"ByteLevel", "Metaspace", "Digits", "Split", "Punctuation"}
BYTE_TOKENS = {f"<0x{byte:02X}>" for byte in range(256)}


def characters_per_token(tokenizer: Tokenizer) -> int | None:
    """The largest number of characters that one token can stand for, or None if there is no bound."""
    vocabulary = tokenizer.get_vocab()
    cutters = parts_of(tokenizer.pre_tokenizer, "pretokenizers") or []
    by_bytes = any(part["type"] == "ByteLevel" for part in cutters)
    alphabet = set(pre_tokenizers.ByteLevel.alphabet()) if by_bytes else BYTE_TOKENS
    if not alphabet <= vocabulary.keys():  # a run of missing characters becomes one unknown token, however long
        return None
    if not by_bytes and not getattr(tokenizer.model, "byte_fallback", False):
        return None
    if any(part["type"] not in CUTS_WITHOUT_LOSS or part.get("behavior") == "Removed" for part in cutters):
        return None
    if any(token.lstrip or token.rstrip for token in tokenizer.get_added_tokens_decoder().values()):
        return None  # such a token absorbs all whitespace beside it
    width = max(map(len, vocabulary))
    for part in parts_of(tokenizer.normalizer, "normalizers") or []:
        shrink = _shrink(part)
        if shrink is None:
            return None
        width *= shrink
    return width


def _shrink(normalizer: dict[str, Any]) -> int | None:
    """The largest number of characters that the normalizer merges into one, or None if there is no bound."""
    if normalizer["type"] == "Replace":
        pattern = normalizer["pattern"].get("String")
        return 1 if pattern and len(normalizer["content"]) >= len(pattern) else None
    return SHRINKS.get(normalizer["type"])
