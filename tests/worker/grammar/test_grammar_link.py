"""What the link to the grammar process promises to the engine."""

import os
import re
import select
import signal
import socket
import sys
import time
from collections.abc import Iterator

import pytest

from tests.cluster.processes import children, stop_still
from tests.worker.grammar.byte_matcher import TOKENIZER
from tests.worker.grammar.grammar_rig import GrammarRig, bits_of
from trunkline.engine.v1.grammar_pb2 import CompileAnswer, CompileRequest
from trunkline.status import CODE_RESOURCE_EXHAUSTED, INTERNAL, INVALID_REQUEST, OVERLOADED, RequestRefused
from trunkline.v1.worker_pb2 import GrammarKind
from trunkline_worker.grammar import compiling, grammar_link
from trunkline_worker.grammar.compiling import Compiling
from trunkline_worker.grammar.connection import Connection
from trunkline_worker.grammar.grammar_link import MAX_TEXT_BYTES, Allowed, Compiled, Refused
from trunkline_worker.grammar.grammar_process import PATIENCE_S, GrammarProcess
from trunkline_worker.grammar.grammar_text import NO_TOKENS
from trunkline_worker.grammar.mask_memory import MaskMemory, Work

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "city": {"const": "alphabet soup"}},
    "required": ["name", "city"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def rig() -> Iterator[GrammarRig]:
    with GrammarRig() as rig:
        yield rig


@pytest.fixture
def own_rig() -> Iterator[GrammarRig]:
    """One whose processes a test ends."""
    with GrammarRig() as rig:
        yield rig


def grammar_process(rig: GrammarRig) -> int:
    assert rig.link._process is not None
    return rig.link._process.pid


def refusal(rig: GrammarRig, kind: int, text: str) -> str:
    _, answer = rig.compile(kind, text)
    assert isinstance(answer, Refused)
    assert answer.error.field == "grammar"
    return answer.error.message


def test_outputs_that_follow_the_masks_match_their_regex(rig: GrammarRig) -> None:
    pattern = "(ab|ba){2,5}-[0-9]{3}"
    digest = rig.regex(pattern)
    for seed in range(10):
        text = rig.text(rig.generate(seed, digest, seed))
        assert re.fullmatch(pattern, text), text


def test_what_must_follow_is_forced_up_to_the_end_of_the_sequence(rig: GrammarRig) -> None:
    allowed = rig.begin(1, rig.regex("alphabet"))
    assert rig.text(allowed.forced) == "alphabet"
    assert allowed.mask is None
    rig.link.end(1)


def test_a_forced_run_is_taken_in_parts(rig: GrammarRig) -> None:
    allowed = rig.begin(1, rig.schema(PERSON))
    run = allowed.forced
    assert len(run) > 3
    _, _, mask = flat(allowed)
    assert flat(rig.advance(1, run[:2])) == (2, run[2:], mask)
    assert flat(rig.advance(1, run[2:])) == (len(run), [], mask)
    rig.link.end(1)


def test_only_the_latest_output_is_answered(own_rig: GrammarRig) -> None:
    rig = own_rig
    allowed = rig.begin(1, rig.regex("[0-9]{9}"))
    assert allowed.mask is not None
    digit = bits_of(allowed.mask)[:1]
    stop_still(matching_process(rig))
    for _ in range(3):
        rig.link.advance(1, digit)
        rig.link.flush()
    os.kill(matching_process(rig), signal.SIGCONT)
    news: list[Allowed] = []
    while not news or news[-1].num_output < 3:
        select.select([rig.link], [], [], 1.0)
        news += [one for one in rig.link.take() if isinstance(one, Allowed)]
    assert [one.num_output for one in news] == [3]


def test_an_output_that_leaves_its_grammar_is_broken(rig: GrammarRig) -> None:
    digest = rig.regex("[0-9]{4}")
    rig.link.begin(1, digest, rig.tokenizer.encode("Once", add_special_tokens=False).ids)
    rig.link.flush()
    rig.until(lambda: 1 in rig.broken)
    assert rig.broken.pop(1).error.reason == "it is not valid"


def test_a_known_grammar_is_answered_again(rig: GrammarRig) -> None:
    assert rig.regex("[a-z]") == rig.regex("[a-z]")


def test_what_crashes_the_compiler_is_refused_and_not_tried_again(rig: GrammarRig) -> None:
    chain = "\n".join(f"r{i}: {'(' * 25} r{i + 1} {')?' * 25}" for i in range(990))
    text = f'start: r0\n{chain}\nr990: "a"'
    rig.link.events.compiles.clear()
    assert "breaks the compiler" in refusal(rig, GrammarKind.GRAMMAR_KIND_LARK, text)
    assert [outcome for outcome, _ in rig.link.events.compiles] == ["harmful"]
    assert "before" in refusal(rig, GrammarKind.GRAMMAR_KIND_LARK, text)


def test_a_bug_in_the_compiler_is_no_fault_of_the_grammar(rig: GrammarRig, monkeypatch: pytest.MonkeyPatch) -> None:
    error: Exception = KeyError("of a client")

    def fail(*_: object) -> str:
        raise error

    monkeypatch.setattr(compiling, "llguidance_grammar", fail)
    digest, _ = rig.compile(GrammarKind.GRAMMAR_KIND_REGEX, "[a-f]")
    request = CompileRequest(digest=digest, kind=GrammarKind.GRAMMAR_KIND_REGEX, text="[a-f]")
    answer = compiling.answer_to(request, TOKENIZER, NO_TOKENS)
    assert answer.error.reason == INTERNAL
    assert not answer.poisonous
    assert "in fail" in answer.trace
    assert "of a client" not in str(answer)
    error = MemoryError()
    with pytest.raises(MemoryError):
        compiling.answer_to(request, TOKENIZER, NO_TOKENS)


def test_a_long_grammar_is_refused(rig: GrammarRig) -> None:
    assert "longer" in refusal(rig, GrammarKind.GRAMMAR_KIND_REGEX, "é" * (MAX_TEXT_BYTES // 2 + 1))


def test_an_invalid_grammar_is_refused(rig: GrammarRig) -> None:
    assert "a class is not closed" in refusal(rig, GrammarKind.GRAMMAR_KIND_REGEX, "[0-9")


def test_a_sequence_whose_grammar_was_never_compiled_is_broken(rig: GrammarRig) -> None:
    rig.link.begin(5, b"unknown")
    rig.until(lambda: 5 in rig.broken)


def test_a_grammar_is_kept_while_a_sequence_awaits_it(own_rig: GrammarRig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = own_rig
    monkeypatch.setattr(grammar_link, "MAX_KEPT_BYTES", 0)
    begun, withdrawn = rig.regex("kept|keen"), rig.regex("kept|keep")
    rig.begin(1, begun)
    rig.link.end(1)
    rig.link.withdraw(withdrawn)
    other = rig.regex("another")
    assert [*rig.link._grammars] == [other]


def test_what_waits_to_be_compiled_is_bounded_and_can_be_withdrawn(
    rig: GrammarRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_link, "MOST_QUEUED", 1)
    monkeypatch.setattr(grammar_link, "MOST_SENT", 0)
    rig.link.compile(b"first", GrammarKind.GRAMMAR_KIND_REGEX, "first")
    _, refused = rig.compile(GrammarKind.GRAMMAR_KIND_REGEX, "second")
    assert isinstance(refused, Refused)
    assert refused.error.reason == OVERLOADED
    rig.link.withdraw(b"first")
    monkeypatch.setattr(grammar_link, "MOST_SENT", 2)
    rig.regex("second")
    assert b"first" not in rig.compiled


def test_a_tenant_waits_for_no_grammars_of_another_and_has_room_of_its_own(
    rig: GrammarRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_link, "MOST_QUEUED", 20)
    monkeypatch.setattr(grammar_link, "MOST_SENT", 2)
    rig.compiled.clear()
    for number in range(20):
        rig.link.compile(b"many%d" % number, GrammarKind.GRAMMAR_KIND_REGEX, f"many{number}", "many")
    rig.link.flush()
    rig.link.compile(b"one", GrammarKind.GRAMMAR_KIND_REGEX, "one", "one")
    rig.link.flush()
    assert b"one" in rig.link._compiling
    rig.until(lambda: len(rig.compiled) == 21)
    assert all(isinstance(answer, Compiled) for answer in rig.compiled.values())


def test_what_may_be_quick_to_compile_waits_for_its_own_tenant_alone() -> None:
    ours, theirs = socket.socketpair()
    memory, file = MaskMemory.create(8, 1)
    with ours, theirs, file:
        process = GrammarProcess(ours, TOKENIZER, NO_TOKENS, memory)
        young = Compiling(b"young", "many", pid=0, pipe=0, started_s=time.monotonic(), answer=bytearray())
        process._compiling[young.pipe] = young
        process._waiting.extend(CompileRequest(tenant=tenant) for tenant in ("many", "one"))
        assert [process._next(), process._next()] == [CompileRequest(tenant="one"), None]
        young.started_s -= PATIENCE_S
        assert process._next() == CompileRequest(tenant="many")


def test_an_expression_that_is_too_complex_is_refused_before_an_answer_begins(rig: GrammarRig) -> None:
    message = refusal(rig, GrammarKind.GRAMMAR_KIND_REGEX, ".*[a-m].{30}")
    assert message == "grammar: it is too large or too complex"


def test_a_grammar_that_starves_again_and_again_is_refused(rig: GrammarRig) -> None:
    digest = rig.regex("starving")
    rig.link._forget(digest)
    busy = RequestRefused(CODE_RESOURCE_EXHAUSTED, OVERLOADED, "busy").to_proto()
    for _ in range(3):
        rig.link._take_compiled(CompileAnswer(digest=digest, error=busy).SerializeToString())
    rig.link.take()
    assert rig.regex("starving") == digest
    rig.link._take_compiled(CompileAnswer(digest=digest, error=busy).SerializeToString())
    assert "before" in refusal(rig, GrammarKind.GRAMMAR_KIND_REGEX, "starving")


def test_sequences_beyond_the_slots_wait_until_others_end() -> None:
    with GrammarRig(slots=2) as rig:
        digest = rig.regex("[0-9]{4}")
        for sequence in range(4):
            rig.link.begin(sequence, digest)
        rig.link.flush()
        rig.until(lambda: len(rig.allowed) == 2)
        for sequence in range(2):
            rig.link.end(sequence)
        rig.link.flush()
        rig.until(lambda: len(rig.allowed) == 4)


def answers(rig: GrammarRig, count: int) -> dict[int, tuple[int, list[int], list[int] | None]]:
    """Waits for the answers of so many sequences."""
    rig.until(lambda: len(rig.allowed) == count)
    return {one.sequence_id: flat(one) for one in rig.allowed.values()}


def flat(allowed: Allowed) -> tuple[int, list[int], list[int] | None]:
    return allowed.num_output, allowed.forced, None if allowed.mask is None else bits_of(allowed.mask)


@pytest.mark.parametrize("which", ["matching process", "grammar process"])
def test_sequences_outlive_their_processes(own_rig: GrammarRig, which: str) -> None:
    rig = own_rig
    outputs = {}
    for sequence in range(8):
        digest = rig.schema(PERSON)
        run = rig.begin(sequence, digest).forced
        outputs[sequence] = run[: sequence + 1]
        rig.advance(sequence, outputs[sequence])
    before = answers(rig, 8)
    rig.allowed.clear()
    grammar_pid = grammar_process(rig)
    os.kill(grammar_pid if which == "grammar process" else matching_process(rig), signal.SIGKILL)
    assert answers(rig, 8) == before
    assert not rig.broken
    assert rig.text(rig.generate(99, rig.regex("abc"), 1)) == "abc", "new grammars go on too"


@pytest.mark.parametrize("which", ["matching process", "grammar process"])
def test_a_process_that_was_stopped_when_it_had_nothing_to_do_is_replaced(
    own_rig: GrammarRig, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    rig = own_rig
    digest = rig.regex("1[0-9]{4}")
    one = rig.begin(1, digest).forced
    expected = flat(rig.begin(2, digest, one))
    stop_still(grammar_process(rig) if which == "grammar process" else matching_process(rig))
    with monkeypatch.context() as impatient:
        impatient.setattr(grammar_link, "ANSWER_TIMEOUT_S", 0.5)
        assert flat(rig.advance(1, one)) == expected
    assert rig.text(rig.generate(3, rig.regex("abc"), 1)) == "abc"
    assert flat(rig.advance(2, [])) == expected


def test_a_grammar_is_compiled_again_if_the_grammar_process_ends_meanwhile_but_not_for_ever(
    own_rig: GrammarRig,
) -> None:
    rig, digest, answers = own_rig, b"abc", list[Compiled | Refused]()
    for attempt in range(5):
        if attempt:
            rig.regex(f"the process starts and answers {attempt}")
            stop_still(grammar_process(rig))
        rig.link.compile(digest, GrammarKind.GRAMMAR_KIND_REGEX, "abc")
        rig.link.flush()
        os.kill(grammar_process(rig), signal.SIGKILL)
        rig.until(lambda: digest in rig.compiled)
        answers.append(rig.compiled.pop(digest))
        rig.link._forget(digest)
    assert [isinstance(answer, Compiled) for answer in answers] == [False, True, True, False, False]
    assert [answer.error.reason for answer in answers if isinstance(answer, Refused)] == [INTERNAL] * 2 + [
        INVALID_REQUEST
    ]


def test_a_grammar_process_that_cannot_start_ends_its_sequences(
    own_rig: GrammarRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = own_rig
    rig.begin(1, rig.regex("[0-9]{4}"))
    pid = grammar_process(rig)
    monkeypatch.setattr(sys, "executable", "/nowhere")
    os.kill(pid, signal.SIGKILL)
    rig.until(lambda: 1 in rig.broken)
    assert "does not start" in rig.broken[1].error.reason
    _, refused = rig.compile(GrammarKind.GRAMMAR_KIND_REGEX, "abc")
    assert isinstance(refused, Refused)
    assert refused.error.reason == INTERNAL
    monkeypatch.undo()
    assert rig.text(rig.generate(2, rig.regex("abc"), 1)) == "abc"


def test_a_matching_process_that_hangs_is_replaced(own_rig: GrammarRig) -> None:
    """It has been at work on a sequence for too long, as the shared memory says."""
    rig = own_rig
    digest, other = rig.regex("[0-9]{4}"), rig.regex("[a-z]{4}")
    before = [flat(rig.begin(0, digest)), flat(rig.begin(1, other))]
    hang(rig, 0)
    rig.allowed.clear()
    rig.until(lambda: 0 in rig.broken and 1 in rig.allowed)
    assert flat(rig.allowed[1]) == before[1]
    assert "too long" in rig.broken[0].error.reason
    assert isinstance(rig.compile(GrammarKind.GRAMMAR_KIND_REGEX, "[0-9]{4}")[1], Compiled), "once is no habit"


def test_a_grammar_that_hangs_again_and_again_is_refused_for_a_while(
    own_rig: GrammarRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = own_rig
    for sequence in range(2):
        rig.begin(sequence, rig.regex("[0-9]{4}"))
        hang(rig, sequence)
        rig.until(lambda sequence=sequence: sequence in rig.broken)  # type: ignore[misc]
    assert "before" in refusal(rig, GrammarKind.GRAMMAR_KIND_REGEX, "[0-9]{4}")
    monkeypatch.setattr(grammar_link, "FORGIVEN_AFTER_S", 0.0)
    rig.regex("[0-9]{4}")


def test_what_begins_before_a_late_kill_is_not_blamed(own_rig: GrammarRig) -> None:
    rig = own_rig
    before = [flat(rig.begin(0, rig.regex("[0-9]{4}"))), flat(rig.begin(1, rig.regex("[a-z]{4}")))]
    hang(rig, 0)
    stop_still(grammar_process(rig))
    rig.link.tick()
    slot, process = place(rig, 1)
    rig.link._memory.begin_work(process, slot, time.monotonic())
    rig.allowed.clear()
    os.kill(grammar_process(rig), signal.SIGCONT)
    rig.until(lambda: len(rig.allowed) == 2)
    assert [flat(rig.allowed[0]), flat(rig.allowed[1])] == before
    assert not rig.broken


def test_a_sequence_that_breaks_its_matching_process_ends_alone(own_rig: GrammarRig) -> None:
    rig = own_rig
    digest, other = rig.regex("[0-9]{4}"), rig.regex("[a-z]{4}")
    rig.begin(0, digest)
    before = flat(rig.begin(1, other))
    slot, process = place(rig, 0)
    rig.link._memory.begin_work(process, slot, time.monotonic())
    rig.allowed.clear()
    os.kill(matching_process(rig), signal.SIGKILL)
    rig.until(lambda: 0 in rig.broken and 1 in rig.allowed)
    assert flat(rig.allowed[1]) == before
    assert "broke off" in rig.broken[0].error.reason
    assert rig.regex("[0-9]{4}") == digest, "once may be chance"


def hang(rig: GrammarRig, sequence: int) -> None:
    """Stops the matching process of a sequence as if it had been working on it for a minute."""
    slot, process = place(rig, sequence)
    stop_still(matching_process(rig))
    rig.link._memory.begin_work(process, slot, time.monotonic() - 60.0)


def place(rig: GrammarRig, sequence: int) -> tuple[int, int]:
    """The slot of a sequence, and the index of its matching process."""
    constrained, matcher = rig.link._sequences[sequence]
    return constrained.slot, matcher.index


def matching_process(rig: GrammarRig) -> int:
    """The only one that has started."""
    (pid,) = children(grammar_process(rig))
    return pid


def test_slow_sequences_get_a_process_of_their_own_and_delay_no_others(own_rig: GrammarRig) -> None:
    rig = own_rig
    slow = rig.schema({"type": "object", "properties": {f"k{i}x": {"type": "integer"} for i in range(450)}})
    quick = rig.regex("[a-z]{4}")
    rig.link._grammars[slow] = rig.link._grammars[slow]._replace(slow=False)  # as if its first tokens were quick
    allowed = rig.begin(0, slow)
    begun = flat(rig.begin(1, quick))
    constrained, _ = rig.link._sequences[0]
    rig.link._set_apart(constrained)  # as a process says that finds it slow
    taken = [*allowed.forced, bits_of(allowed.mask)[0]] if allowed.mask is not None else []
    moved = flat(rig.advance(0, taken))
    assert place(rig, 0)[1] == rig.link._matchers[-1].index != place(rig, 1)[1]
    fresh = flat(rig.begin(2, slow, taken))
    assert moved == fresh
    assert place(rig, 2)[1] == rig.link._matchers[-1].index, "the grammar is known as slow"
    assert flat(rig.begin(3, quick)) == begun


def test_work_that_is_being_written_does_not_count_as_old() -> None:
    """The engine reads while another process writes, which clears a place before it fills it."""
    memory, file = MaskMemory.create(vocab_size=64, num_slots=2)
    with file:
        memory.begin_work(0, 1, 0.0)
        assert memory.work(0) is None
        memory.begin_work(0, 1, 5.0)
        assert memory.work(0) == Work(1, 5.0)
        memory.end_work(0)
        assert memory.work(0) is None


def test_a_full_socket_takes_each_handed_over_socket_with_its_own_data() -> None:
    ours, theirs = socket.socketpair()
    connection, descriptors, data = Connection(ours), list[int](), bytearray()
    before = bytes(1 << 20)
    connection.send(before)
    assert connection.is_behind
    pairs = [socket.socketpair() for _ in range(2)]
    for _, given in pairs:
        connection.send(b"takes it along", given)
    while len(data) < len(before) + 2 * len(b"takes it along"):
        some, taken, _, _ = socket.recv_fds(theirs, 1 << 16, 1)
        data += some
        descriptors += taken
        connection.send()
    for number, descriptor in enumerate(descriptors):
        with socket.socket(fileno=descriptor) as end:
            end.send(bytes([number]))
    assert [kept.recv(1) for kept, _ in pairs] == [b"\0", b"\1"]
    for end in (theirs, *(kept for kept, _ in pairs)):
        end.close()
    connection.close()
