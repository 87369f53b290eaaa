"""What the text of an output has to be, from decoding in one piece; and token ids of every awkward kind."""

import os.path
from collections.abc import Iterable, Sequence

from hypothesis import strategies as st
from tokenizers import Tokenizer

from trunkline_worker.front.text.output_stream import NewText

TEXTS = (
    "Once upon a time there was a fox.",
    " two  blanks,\n\n\ttabs and\r\nlines ",
    "麤龘靐齉 日本語テキスト 中文",
    "🦊👩‍👩‍👧‍👦🏽🇦🇶 é e\u0301 \u200d",
    "שלום עליכם السلام عليكم",
    "for (i = 0; i < n; ++i) { a[i] <<= 1; } // naïve",
    "\ufffd literal \ufffd\ufffd😀 \ufffd",
    "<0x0A> <0xE9> <s> </s> ▁ \u2581",
)


def added_text(tokenizer: Tokenizer, prompt: Sequence[int], output: Sequence[int], *, keep_special: bool) -> str:
    """What the output adds to its prompt: see Detokenizer."""
    alone = tokenizer.decode(list(prompt), skip_special_tokens=not keep_special)
    both: str = tokenizer.decode([*prompt, *output], skip_special_tokens=not keep_special)
    return both[len(os.path.commonprefix([alone, both])) :]  # noqa: RUF071  # of characters


def text_of(news: Iterable[NewText]) -> str:
    """The text after all of these."""
    final, undecided = "", ""
    for new in news:
        undecided = new.text if new.withdraws else undecided + new.text
        if new.is_final:
            final, undecided = final + undecided, ""
    return final + undecided


def token_ids(tokenizer: Tokenizer, *, max_parts: int = 12) -> st.SearchStrategy[list[int]]:
    """Lists of ids: any, of single bytes, special and added ones, of parts of texts, and ids that say nothing."""
    size = tokenizer.get_vocab_size()
    bytes_ = [token_id for token_id in range(size) if _is_byte(tokenizer.id_to_token(token_id) or "")]
    added = sorted(tokenizer.get_added_tokens_decoder())
    spelled = [tokenizer.encode(text, add_special_tokens=False).ids for text in TEXTS]
    parts = [
        st.integers(0, size + 2).map(lambda token_id: [token_id]),
        st.sampled_from(spelled).flatmap(
            lambda ids: st.tuples(st.integers(0, len(ids)), st.integers(0, 12)).map(lambda cut: ids[cut[0] :][: cut[1]])
        ),
    ]
    if bytes_:
        parts += [st.lists(st.sampled_from(bytes_), max_size=6)] * 2
    if added:
        parts.append(st.lists(st.sampled_from(added), max_size=9))
    return st.lists(st.one_of(parts), max_size=max_parts).map(lambda lists: [one for part in lists for one in part])


def _is_byte(token: str) -> bool:
    return len(token) == 1 or (len(token) == 6 and token.startswith("<0x"))
