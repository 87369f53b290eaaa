"""What may follow an output depends on the output alone, and not on what has been asked before."""

import json
import re
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import pytest
from jsonschema_rs import validator_for
from llguidance import LLMatcher, LLTokenizer

from tests.worker.grammar.grammar_rig import DEMO, DEMO_EOS, DEMO_VOCAB, GrammarRig, bits_of
from trunkline.v1.worker_pb2 import GrammarKind
from trunkline_worker.grammar.grammar_text import llguidance_grammar
from trunkline_worker.grammar.matching import CannotMatch, Matching, compiled

TOKENIZER = LLTokenizer(str(DEMO), n_vocab=DEMO_VOCAB, eos_token=[DEMO_EOS])
WORDS = ["name", "city", "a", "zip code", "é", "id"]
MOST_TOKENS = 80

Answer = tuple[int, list[int], list[int]]  # output tokens, forced tokens, allowed tokens


def schema(chance: Random, depth: int = 0) -> dict[str, Any]:
    """A random schema."""
    simple: list[Callable[[], dict[str, Any]]] = [
        lambda: {"type": "string", "maxLength": chance.randrange(6)},
        lambda: {"type": "integer", "minimum": -5, "maximum": chance.randrange(500)},
        lambda: {"enum": chance.sample(["red", "green", "grey", 1, None, True], 3)},
        lambda: {"const": chance.choice(["alphabet soup", 12345, [1, 2, 3]])},
        lambda: {"type": "boolean"},
    ]
    if depth == 3 or chance.random() < 0.3:
        return chance.choice(simple)()
    if chance.random() < 0.3:
        return {"type": "array", "items": schema(chance, depth + 1), "maxItems": 3}
    names = chance.sample(WORDS, chance.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: schema(chance, depth + 1) for name in names},
        "required": [name for name in names if chance.random() < 0.7],
        "additionalProperties": False,
    }


def pattern(chance: Random, depth: int = 0) -> str:
    """A random regular expression."""
    if depth == 3 or chance.random() < 0.3:
        return chance.choice(["abc", "[0-9]", "the", "é", "[a-f]", "once upon"])
    parts = [pattern(chance, depth + 1) for _ in range(chance.randint(1, 3))]
    return chance.choice(["".join(parts), f"({'|'.join(parts)})", f"({''.join(parts)}){{0,3}}", f"({''.join(parts)})?"])


def grammar(seed: int) -> tuple[int, str]:
    chance = Random(seed)
    if seed % 2:
        return GrammarKind.GRAMMAR_KIND_REGEX, pattern(chance)
    return GrammarKind.GRAMMAR_KIND_JSON_SCHEMA, json.dumps(schema(chance))


def matcher(seed: int) -> LLMatcher:
    return compiled(TOKENIZER, llguidance_grammar(*grammar(seed)))


def answer(matching: Matching) -> Answer:
    mask = np.full(DEMO_VOCAB // 32, -1, np.int32)
    has_mask = matching.mask_into(mask.ctypes.data, mask.nbytes)
    return matching.num_output, list(matching.forced), bits_of(mask) if has_mask else []


def walk(matching: Matching, chance: Random) -> tuple[list[int], list[Answer]]:
    """A random output, and what might follow before each of its tokens. Forced tokens are taken one by one."""
    output: list[int] = []
    answers = [answer(matching)]
    while len(output) < MOST_TOKENS:
        _, forced, allowed = answers[-1]
        output.append(forced[0] if forced else chance.choice(allowed))
        if output[-1] == DEMO_EOS:
            break
        matching.advance(output[-1:])
        answers.append(answer(matching))
    return output, answers


@pytest.mark.parametrize("seed", range(40))
def test_an_output_is_matched_again_from_every_prefix_as_it_was_the_first_time(seed: int) -> None:
    base = matcher(seed)
    output, answers = walk(Matching(base.deep_copy(), TOKENIZER), Random(seed))
    for length, found in enumerate(answers):
        fresh = base.deep_copy() if seed % 4 < 2 else matcher(seed)
        again = Matching(fresh, TOKENIZER, output[:length])
        assert answer(again) == found
        cut = min(len(output), length + 3)
        if DEMO_EOS not in output[length:cut]:
            again.advance(output[length:cut])
            assert answer(again) == answers[cut], "several tokens at once are as good as one by one"


@pytest.mark.parametrize("seed", range(20))
def test_forks_of_a_grammar_do_not_disturb_each_other(seed: int) -> None:
    base = matcher(seed)
    alone = [walk(Matching(matcher(seed), TOKENIZER), Random(number)) for number in range(3)]
    forks = [Matching(base.deep_copy(), TOKENIZER) for _ in alone]
    for position in range(max(len(output) for output, _ in alone)):
        for fork, (output, answers) in zip(forks, alone, strict=True):
            if position < len(answers):
                assert answer(fork) == answers[position]
                if position + 1 < len(answers):
                    fork.advance(output[position : position + 1])


@pytest.mark.parametrize("seed", range(40))
def test_finished_outputs_satisfy_their_grammar(seed: int) -> None:
    kind, text = grammar(seed)
    output, _ = walk(Matching(matcher(seed), TOKENIZER), Random(seed))
    if output[-1] != DEMO_EOS:
        return  # cut off
    document = TOKENIZER.decode_str(output[:-1])
    if kind == GrammarKind.GRAMMAR_KIND_REGEX:
        assert re.fullmatch(text, document)
    else:
        assert validator_for(json.loads(text)).is_valid(json.loads(document))


def test_masks_allow_nothing_but_text_and_the_end() -> None:
    special = [token for token in range(DEMO_VOCAB) if TOKENIZER.is_special_token(token) and token != DEMO_EOS]
    assert special, "the tokenizer has others"
    for seed in range(40):
        for _, forced, allowed in walk(Matching(matcher(seed), TOKENIZER), Random(seed))[1]:
            assert not set(special) & {*forced, *allowed}


def test_masks_never_leak_between_slots() -> None:
    """Sequences begin, end, are aborted early and use slots of others again; each answer is that of its own grammar."""
    chance = Random(7)
    with GrammarRig(slots=6) as rig:
        digests = {seed: rig.compile(*grammar(seed))[0] for seed in range(12)}
        live: dict[int, tuple[int, list[int]]] = {}  # sequence → seed of its grammar, output
        bases = {seed: matcher(seed) for seed in digests}
        for number in range(300):
            if len(live) < 8 and chance.random() < 0.6:  # more than there are slots
                seed = chance.choice(list(digests))
                live[number] = seed, []
                rig.link.begin(number, digests[seed])
            for sequence, (seed, output) in list(live.items()):
                allowed = rig.allowed.pop(sequence, None)
                if allowed is None:
                    if chance.random() < 0.1:  # aborted while an answer is on its way
                        rig.link.end(sequence)
                        del live[sequence]
                    continue
                mask = [] if allowed.mask is None else bits_of(allowed.mask)
                expected = answer(Matching(bases[seed].deep_copy(), TOKENIZER, output))
                assert (allowed.num_output, allowed.forced, mask) == expected
                new = allowed.forced[: chance.randint(1, 4)] or [chance.choice(mask)]
                if DEMO_EOS in new or len(output) > MOST_TOKENS:
                    rig.link.end(sequence)
                    del live[sequence]
                else:
                    output += new
                    rig.link.advance(sequence, new)
            rig.link.flush()
            waiting = chance.random() < 0.5
            rig.until(lambda waiting=waiting: not waiting or not live or bool(rig.allowed.keys() & live.keys()))  # type: ignore[misc]
        assert not rig.broken


def test_a_run_is_forced_from_the_token_on_that_decides_it() -> None:
    matching = Matching(compiled(TOKENIZER, LLMatcher.grammar_from_regex("(red|blue) house")), TOKENIZER)
    blue = next(token for token in answer(matching)[2] if TOKENIZER.decode_str([token]) == "b")
    matching.advance([blue])
    assert TOKENIZER.decode_str(matching.forced) == "lue house"


def test_an_output_that_differs_from_what_is_forced_cannot_go_on() -> None:
    base = compiled(TOKENIZER, LLMatcher.grammar_from_regex("alphabet"))
    forced = Matching(base.deep_copy(), TOKENIZER).forced
    with pytest.raises(CannotMatch, match="differs"):
        Matching(base, TOKENIZER, [forced[0], forced[0] + 1])


def test_what_no_text_satisfies_does_not_end_as_if_it_were_satisfied() -> None:
    matching = Matching(compiled(TOKENIZER, LLMatcher.grammar_from_regex("[^\\s\\S]")), TOKENIZER)
    with pytest.raises(CannotMatch, match="no text"):
        answer(matching)
