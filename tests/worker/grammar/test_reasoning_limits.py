"""Limits of reasoning, in each format that reasons: after so many tokens the mark at its end is forced."""

import ctypes
import json
import re
from pathlib import Path
from random import Random

import pytest
from llguidance import LLTokenizer

from tests.contract.call_grammars import UNENFORCED, grammar_of
from tests.worker.grammar.byte_matcher import TAGS
from tests.worker.grammar.grammar_rig import DEMO, DEMO_EOS, DEMO_VOCAB
from trunkline.answer.answer_parser import PARSERS, reasoning_marks
from trunkline_worker.grammar.compiling import drawn
from trunkline_worker.grammar.grammar_text import llguidance_grammar
from trunkline_worker.grammar.matching import Matching, compiled
from trunkline_worker.grammar.structural_literals import AddedTokens

MARKS = {name: next(iter(reasoning_marks(name).items())) for name in PARSERS if reasoning_marks(name)}
HARMONY = "<|channel|>analysis<|message|>", "<|end|>"
CASES = [(name, *marks, True) for name, marks in MARKS.items()]
CASES += [(name, *marks, False) for name, marks in MARKS.items() if name not in UNENFORCED]
TOKEN = re.compile(r"(<[^<>]+>|\[/?[A-Z]+\])")
VOCAB = DEMO_VOCAB + 32


@pytest.mark.parametrize("limit", [0, 1, 7, 60])
@pytest.mark.parametrize(("answer_format", "begin", "end", "in_prompt"), [*CASES, ("harmony", *HARMONY, False)])
def test_a_limit_holds_to_the_token(
    answer_format: str, begin: str, end: str, in_prompt: bool, limit: int, tmp_path: Path
) -> None:
    content, ids = json.loads(DEMO.read_text()), dict[str, int]()
    for text in (*TOKEN.findall(begin + end), "<|start|>", "<|channel|>"):
        ids.setdefault(text, DEMO_VOCAB + len(ids))
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    content["added_tokens"] += [{"id": token, "content": text, "special": True, **flags} for text, token in ids.items()]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    library = LLTokenizer(str(tmp_path / "tokenizer.json"), n_vocab=VOCAB, eos_token=DEMO_EOS)

    prompt_end = begin if in_prompt else "assistant"
    element = grammar_of(answer_format, begin + end, prompt_end, tools=[], max_reasoning_tokens=limit)
    grammar = llguidance_grammar(TAGS, json.dumps({"format": element}), AddedTokens.of(content, [DEMO_EOS]))
    matching = Matching(compiled(library, grammar), library)
    mask = (ctypes.c_uint32 * ((VOCAB + 31) // 32))()
    if not in_prompt:
        pieces = [[ids[piece]] if piece in ids else library.tokenize_str(piece) for piece in TOKEN.split(begin)]
        matching.advance([token for piece in pieces for token in piece])
    chance, before = Random(limit), 0
    end_token = ids[TOKEN.findall(end)[0]]
    while matching.forced[:1] != [end_token]:
        assert not matching.forced
        assert matching.mask_into(ctypes.addressof(mask), ctypes.sizeof(mask))
        allowed = int.from_bytes(mask, "little")
        if allowed == 1 << end_token:
            break
        matching.advance([drawn(allowed & ~(1 << end_token), chance.randrange(VOCAB))])
        before += 1
    assert before == limit
