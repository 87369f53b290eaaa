"""The catalogue of attacks lists all of them, and every broken bound is reported."""

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet
from hypothesis import given
from hypothesis import strategies as st

from trunkline.v1.fleet_pb2 import ExplainRouteRequest
from trunkline.v1.inference_pb2 import DetokenizeRequest, GenerateRequest, TokenizeRequest
from trunkline.v1.worker_pb2 import SessionRequest
from trunkline_bench.attacks.attack_process import AttackProcess
from trunkline_bench.attacks.attack_result import AttackResult, Bounds, bound_beside_others
from trunkline_bench.attacks.catalogue import NONE, Section, cases
from trunkline_bench.attacks.host_faults import HOST_FAULTS
from trunkline_bench.attacks.innocent import Record
from trunkline_bench.attacks.main import chosen
from trunkline_bench.attacks.vectors import wire
from trunkline_bench.attacks.vectors.attacker import ALL_OF_1_TO_5, ATTACKS
from trunkline_bench.attacks.vectors.calls import CALLS, MALFORMED
from trunkline_bench.attacks.vectors.lies import LIES
from trunkline_bench.attacks.vectors.priority import NICE
from trunkline_bench.attacks.vectors.redis_entries import ATTACKS as REDIS_ATTACKS
from trunkline_bench.attacks.watched_server import LoopLag, lag_between, watching
from trunkline_bench.attacks.window import ENOUGH, HOLD_S, MOST_S, fixed, until_enough
from trunkline_runtime.wire import varint_bytes

BOUNDS = Bounds(p99_ms=250.0, later_ms=100.0, rss_mib=1024.0, kept_mib=256.0, own_lag_ms=100.0)
GOOD = {"p99": 20.0, "later": 10.0, "peak": 200.0, "after": 100.0, "own": 5.0}
PARSED_SIZE = 10_000  # the largest messages take gigabytes to parse; these have the same form
LIMITS = {"p99": 250.0, "later": 100.0, "peak": 1024.0, "after": 100.0 + 256.0, "own": 100.0}


def result_of(measured: dict[str, float]) -> AttackResult:
    lag = LoopLag(measured["own"], measured["own"])
    return AttackResult(
        "an attack", BOUNDS, 8.0, "1 OK", Record([measured["p99"]], [measured["later"]]), 100.0, measured["peak"],
        measured["after"], lag,
    )  # fmt: skip


def test_the_catalogue_lists_exactly_the_attacks_that_can_be_run() -> None:
    listed = {case.attack for case in cases()} - {NONE}
    assert listed == {*ATTACKS, *LIES, *REDIS_ATTACKS, *HOST_FAULTS}


def test_every_attack_that_is_legal_work_is_compared_with_the_same_requests_without_it() -> None:
    for case in cases():
        alone = [one for one in cases() if one.section is case.section and one.asks == case.asks and one.attack == NONE]
        assert alone or not case.is_beside_others, case


@pytest.mark.parametrize("section", Section)
def test_the_attacks_of_a_section_can_be_run_by_its_name_alone(section: Section) -> None:
    wanted = chosen(section.value)
    assert [case for case in wanted if case.section is section and case.attack != NONE]
    assert all(case.section is section for case in wanted)


def test_an_attack_selected_by_name_includes_its_baseline() -> None:
    assert [case.name for case in chosen("64 requests of 16 choices")] == [
        NONE,
        "64 requests of 16 choices of 900 tokens",
    ]
    assert [case.name for case in chosen("ping flood")] == ["ping flood"]
    assert not chosen("no such attack")
    assert len(chosen("")) == len(cases())


@given(st.dictionaries(st.sampled_from(sorted(GOOD)), st.floats(0.0, 10.0)))
def test_a_row_names_each_bound_that_was_broken_and_no_other_one(times: dict[str, float]) -> None:
    measured = GOOD | {name: LIMITS[name] * factor for name, factor in times.items()}
    broken = {name for name, value in measured.items() if value > LIMITS[name]}
    result = result_of(measured)
    assert len(result.misses()) == len(broken)
    assert ("holds" in result.markdown()) == (not broken)


def test_a_failed_request_and_a_strange_status_are_misses_too() -> None:
    result = result_of(GOOD)
    result.record.errors.append("NoWorker: a | b\nc")
    result.strange_statuses = ("UNKNOWN",)
    assert len(result.misses()) == 2
    assert result.markdown().count("\n") == 0
    assert result.markdown().replace("\\|", "").count("|") == 15, "an error message adds no cells"


@given(st.floats(0.1, 1e4))
def test_the_bound_beside_others_is_the_larger_one_of_four_times_and_200_ms_more(alone_ms: float) -> None:
    assert bound_beside_others(alone_ms) in (4 * alone_ms, alone_ms + 200)
    assert bound_beside_others(alone_ms) >= max(4 * alone_ms, alone_ms + 200) - 1e-9


@given(st.integers(1, 1 << 28), st.integers(0, 1 << 63), st.binary(max_size=300))
def test_hand_encoded_messages_decode_to_the_intended_fields(field: int, value: int, payload: bytes) -> None:
    assert varint_bytes(value) == wire.number(1, value)[1:]
    assert wire.nested(field, payload).endswith(varint_bytes(len(payload)) + payload)
    request = GenerateRequest.FromString(wire.nested(3, wire.nested(1, b"".join(map(varint_bytes, payload)))))
    assert list(request.token_ids.ids) == list(payload)
    assert len(SessionRequest.FromString(wire.empty_entries(2, 2 * len(payload))).submits) == len(payload)


@pytest.mark.parametrize("name", [name for name in CALLS if name not in MALFORMED])
def test_each_call_sends_a_message_of_its_method(name: str) -> None:
    messages: dict[str, Callable[[bytes], Message]] = {
        "Generate": GenerateRequest.FromString,
        "Tokenize": TokenizeRequest.FromString,
        "Detokenize": DetokenizeRequest.FromString,
        "ExplainRoute": ExplainRouteRequest.FromString,
    }
    call = CALLS[name]
    small = call.message(min(call.size, PARSED_SIZE))
    read = messages[call.method.rpartition("/")[2]](small)
    assert not len(UnknownFieldSet(read))
    assert read.SerializeToString()
    if call.size > PARSED_SIZE:
        assert len(call.message(2 * PARSED_SIZE)) > 1.5 * len(small), "size scales the message"


async def test_a_blocked_loop_is_measured_without_the_time_spent_waiting_for_a_core(
    tmp_path: Path,
) -> None:
    file = tmp_path / "lag"
    async with watching(file):
        await asyncio.sleep(0.15)
        began_s = time.monotonic()
        spent_s = time.thread_time() + 0.08
        while time.thread_time() < spent_s:
            pass
        await asyncio.sleep(0.15)
    seen = lag_between(file, began_s, time.monotonic())
    assert seen.lag_ms >= seen.own_ms >= 70
    assert lag_between(file, began_s - 100.0, began_s - 99.0) == LoopLag()
    assert lag_between(file, began_s, time.monotonic() + 60.0).own_ms > 50_000, "a loop that writes nothing is blocked"


def test_an_unknown_attack_is_refused_in_one_line(tmp_path: Path) -> None:
    command = ("-m", "trunkline_bench.attacks.main", "--only=no such attack", f"--output={tmp_path}")
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith("--only=no such attack: no attack has this in its name or section")
    assert not list(tmp_path.iterdir())


def session_priority(pid: int) -> int:
    """The nice value of the session that the process leads, if the kernel groups processes by session."""
    autogroup = Path(f"/proc/{pid}/autogroup")
    return int(autogroup.read_text().split()[-1]) if autogroup.exists() else NICE


async def test_an_attacker_has_a_lower_priority_than_its_victims_and_reports_its_outcomes_when_ended() -> None:
    with socket.create_server(("127.0.0.1", 0)) as victim:
        victim.settimeout(60.0)
        attack = AttackProcess("5,000 idle connections", f"127.0.0.1:{victim.getsockname()[1]}", 60.0)
        try:
            await attack.begins()
            first, _ = await asyncio.to_thread(victim.accept)
            second, _ = await asyncio.to_thread(victim.accept)  # the first connection has been counted
            with first, second:
                assert os.getpriority(os.PRIO_PROCESS, attack.pid) == session_priority(attack.pid) == NICE
                assert (await attack.end())["connections"] >= 1
        finally:
            await attack.stop()


@given(st.floats(0.0, 20.0), st.integers(0, 1000))
def test_an_attack_lasts_until_enough_requests_have_ended_or_its_longest_time(passed_s: float, requests: int) -> None:
    assert until_enough(3.0).is_over(passed_s, requests) == (
        passed_s >= MOST_S or (passed_s >= 3.0 and requests >= ENOUGH)
    )
    assert fixed(HOLD_S).is_over(passed_s, requests) == (passed_s >= HOLD_S)


def test_an_attack_that_strikes_once_is_measured_for_a_fixed_time() -> None:
    windows = {case.attack: case.window(3.0) for case in cases()}
    assert windows["10,000 health watches"] == windows["10,000 idle sessions"] == fixed(HOLD_S)
    assert windows["rapid reset"] == until_enough(3.0)
    assert windows[ALL_OF_1_TO_5] == fixed(60.0)
