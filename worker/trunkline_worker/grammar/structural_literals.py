"""Literals of a structural tag: strings, in which the added tokens of a tokenizer stand for themselves."""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from trunkline_worker.grammar.lark_text import lark_string
from trunkline_worker.grammar.structural_elements import refused_at


class Token(NamedTuple):
    """An added token. It is not produced by its characters."""

    text: str
    id: int


Literal = Sequence[str | Token]  # texts that are not empty, and the tokens between them


class AddedTokens:
    """The added tokens of a tokenizer, which literals may contain.

    ids: by text, which is not blank; None: the token ends an answer
    eos: the tokens that end an answer
    num_tokens: of the tokenizer, added ones included
    """

    def __init__(self, ids: Mapping[str, int | None], eos: Collection[int] = (), num_tokens: int = 0) -> None:
        self._ids = ids
        self._eos = eos
        self._num_tokens = num_tokens
        self._texts = re.compile("|".join(re.escape(text) for text in sorted(ids, key=len, reverse=True)) or "(?!)")

    @classmethod
    def of(cls, tokenizer: Mapping[str, Any], eos: Collection[int]) -> "AddedTokens":
        """tokenizer: the content of a tokenizer.json"""
        added = {token["content"]: token["id"] for token in tokenizer.get("added_tokens", [])}
        ids = {text: None if token in eos else token for text, token in added.items() if text.strip()}
        vocab = tokenizer["model"]["vocab"]
        in_model = max(vocab.values()) if isinstance(vocab, dict) else len(vocab) - 1
        return cls(ids, eos, 1 + max(in_model, *added.values()))

    def but(self, texts: Collection[str], at: str, *, strict: bool) -> str:
        """All tokens but these, and those that end an answer, in Lark.  strict: each text must be a token"""
        unknown = [text for text in texts if self._ids.get(text) is None]
        if unknown and strict:
            raise refused_at(at, f"{unknown[0][:64]!r} is no added token of the tokenizer that an answer may have")
        ranges, start = [], 0
        for token in sorted(
            {*self._eos, *(token for text in texts if (token := self._ids.get(text)) is not None), self._num_tokens}
        ):
            if start < token <= self._num_tokens:
                ranges.append(f"{start}-{token - 1}")
            start = token + 1
        return f"<[{','.join(ranges)}]>"

    def literal(self, text: str, at: str) -> Literal:
        """at: the JSON pointer of the text"""
        parts: list[str | Token] = []
        end = 0
        for found in self._texts.finditer(text):
            token = self._ids[found[0]]
            if token is None:
                raise refused_at(at, f"{found[0][:64]} ends every answer, and can stand nowhere else")
            parts += [text[end : found.start()], Token(found[0], token)]
            end = found.end()
        return [part for part in (*parts, text[end:]) if part]


def cut(literal: Literal, length: int) -> tuple[Literal, Literal]:
    """The first characters of a literal, with the whole of a token that they end in; and the rest."""
    head: list[str | Token] = []
    for index, part in enumerate(literal):
        if isinstance(part, Token) or len(part) < length:
            head.append(part)
            length -= len(part.text if isinstance(part, Token) else part)
            if length > 0:
                continue
            return head, literal[index + 1 :]
        rest = [part[length:]] if part[length:] else []
        return [*head, part[:length]], [*rest, *literal[index + 1 :]]
    return head, ()


def literal_lark(literal: Literal) -> str:
    return " ".join(f"<[{part.id}]>" if isinstance(part, Token) else lark_string(part) for part in literal) or '""'


def choice_lark(literals: Sequence[Literal]) -> str:
    return "(" + " | ".join(map(literal_lark, literals)) + ")" if literals else '""'
