"""A session sends each grammar once, before the submits that name it, and never more than its worker keeps."""

from random import Random
from typing import Any

import pytest

from trunkline.names import grammar_digest
from trunkline.status import OVERLOADED
from trunkline.v1.generation_pb2 import FinishReason, OutputChunk, SamplingParams
from trunkline.v1.worker_pb2 import Grammar, GrammarKind, SequenceOutput, SessionRequest, Submit, Work
from trunkline_router.workers.session import WorkerSession, split_request
from trunkline_router.workers.session_grammars import LEAST_BYTES, MOST_KEPT_BYTES, SessionGrammars

STOP = FinishReason.FINISH_REASON_STOP


def grammar(name: str, num_bytes: int = LEAST_BYTES) -> Grammar:
    made = Grammar(kind=GrammarKind.GRAMMAR_KIND_REGEX, text=name.ljust(num_bytes, "x"))
    made.digest = grammar_digest(made)
    return made


A, B, C = (grammar(name) for name in "abc")


class Talk:
    """A session whose messages are looked at instead of written."""

    def __init__(self, most_bytes: int) -> None:
        self.session = WorkerSession(vocab_size=50, most_grammar_bytes=most_bytes)
        self.heard: list[SequenceOutput] = []

    def submit(self, given: Grammar) -> int:
        submit = Submit(prompt_token_ids=[1], sampling=SamplingParams(max_tokens=5), work=Work(grammar=given))
        (handle,) = self.session.submit([submit], [self.heard.append])
        return handle

    def end(self, *handles: int) -> None:
        for handle in handles:
            chunk = OutputChunk(token_ids=[1], finish_reason=STOP)
            self.session.outputs.hand_out_all([SequenceOutput(handle=handle, chunk=chunk)])

    def written(self) -> list[dict[str, list[Any]]]:
        """What the session would write now: of each message the names of grammars."""
        request, self.session._pending = self.session._pending, SessionRequest()
        names = {one.digest: name for name, one in zip("abc", (A, B, C), strict=True)}
        told = []
        for part in split_request(request):
            told.append({
                "submits": [names[submit.work.grammar.digest] for submit in part.submits],
                "grammars": [names[one.digest] for one in part.grammars],
                "dropped": [names[digest] for digest in part.dropped_grammars],
            })  # fmt: skip
        return [{kind: found for kind, found in message.items() if found} for message in told]


def test_a_grammar_is_sent_once_in_an_earlier_message_and_submits_have_its_digest_alone() -> None:
    talk = Talk(4 * LEAST_BYTES)
    talk.submit(A)
    talk.submit(A)
    talk.submit(B)
    assert talk.session._pending.submits[0].work == Work(grammar=Grammar(digest=A.digest))
    assert list(talk.session._pending.grammars) == [A, B]
    assert talk.written() == [{"grammars": ["a"]}, {"grammars": ["b"]}, {"submits": ["a", "a", "b"]}]
    talk.submit(B)
    assert talk.written() == [{"submits": ["b"]}]


def test_the_one_that_was_named_longest_ago_makes_room() -> None:
    talk = Talk(2 * LEAST_BYTES)
    handles = [talk.submit(A), talk.submit(B), talk.submit(A)]
    talk.end(*handles)
    talk.written()
    talk.submit(C)
    assert talk.written() == [{"dropped": ["b"]}, {"grammars": ["c"]}, {"submits": ["c"]}]
    talk.submit(A)
    assert talk.written() == [{"submits": ["a"]}], "it was kept"
    talk.submit(B)
    assert talk.written() == [{"dropped": ["c"]}, {"grammars": ["b"]}, {"submits": ["b"]}]


def test_what_an_unsent_choice_names_is_not_dropped_and_what_an_open_one_names_is() -> None:
    talk = Talk(2 * LEAST_BYTES)
    talk.submit(A), talk.submit(B)
    talk.submit(C)
    ((error),) = [output.error for output in talk.heard]
    assert (error.reason, bool(error.retry_delay_ms)) == (OVERLOADED, True)
    assert talk.written() == [{"grammars": ["a"]}, {"grammars": ["b"]}, {"submits": ["a", "b"]}]
    talk.submit(C)
    assert talk.written() == [{"dropped": ["a"]}, {"grammars": ["c"]}, {"submits": ["c"]}]
    assert talk.session.num_open == 3


def test_what_an_aborted_submit_names_is_not_dropped_before_it_is_written() -> None:
    talk = Talk(LEAST_BYTES)
    talk.session.abort([talk.submit(A)])
    talk.submit(B)
    assert [output.error.reason for output in talk.heard] == [OVERLOADED]
    assert [sorted(message) for message in talk.written()] == [["grammars"], ["submits"]]
    talk.submit(B)
    assert talk.written()[0] == {"dropped": ["a"]}


def test_one_that_was_about_to_be_dropped_is_kept_instead_of_sent_again() -> None:
    talk = Talk(3 * LEAST_BYTES)
    long = grammar("long", 2 * LEAST_BYTES)
    talk.end(talk.submit(A), talk.submit(B), talk.submit(C))
    talk.written()
    talk.end(talk.submit(long))  # in place of two
    assert list(talk.session._pending.dropped_grammars) == [A.digest, B.digest]
    grammars, pending = talk.session._grammars, SessionRequest()
    pending.dropped_grammars.extend([A.digest, B.digest])
    grammars.name(A, pending, set)
    assert list(pending.dropped_grammars) == [B.digest, C.digest]
    assert not pending.grammars


def test_a_short_text_counts_for_more_so_that_the_list_is_bounded() -> None:
    grammars = SessionGrammars(1 << 62)
    for number in range(MOST_KEPT_BYTES // LEAST_BYTES + 1):
        request = SessionRequest()
        assert grammars.name(grammar(str(number), 0), request, set)
    assert len(request.dropped_grammars) == 1


@pytest.mark.parametrize("seed", range(20))
def test_a_worker_that_follows_the_messages_has_what_each_submit_names_and_no_more_than_it_keeps(seed: int) -> None:
    rng, room = Random(seed), 5 * LEAST_BYTES
    known = [grammar(str(number), rng.choice([0, LEAST_BYTES, 2 * LEAST_BYTES])) for number in range(9)]
    talk, kept = Talk(room), dict[bytes, int]()
    opened: list[int] = []
    for _ in range(400):
        if opened and rng.random() < 0.45:
            handle = opened.pop(rng.randrange(len(opened)))
            if handle not in talk.session.outputs.open:
                continue
            talk.end(handle) if rng.random() < 0.5 else talk.session.abort([handle])
        else:
            opened.append(talk.submit(rng.choice(known)))
        if rng.random() < 0.5:
            request, talk.session._pending = talk.session._pending, SessionRequest()
            for message in split_request(request):
                assert all(submit.work.grammar.digest in kept for submit in message.submits)
                for digest in message.dropped_grammars:
                    del kept[digest]
                for one in message.grammars:
                    assert one.digest not in kept
                    kept[one.digest] = len(one.text)
                assert sum(kept.values()) <= room
    assert kept
    assert all(output.error.reason in ("", OVERLOADED) for output in talk.heard)
