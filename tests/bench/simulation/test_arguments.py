"""Arguments of the simulator's commands: every value is accepted, or refused in one line."""

import contextlib
import io

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trunkline_bench.simulation import main as simulate
from trunkline_bench.simulation.fleet import main as simulate_fleet

MODULES = {"simulate": simulate, "simulate-fleet": simulate_fleet}
FLAGS = [
    (command, action.option_strings[-1], action.nargs or 1)
    for command, module in MODULES.items()
    for action in module.make_parser()._actions
    if action.nargs != 0  # a switch has no value
]
WORDS = st.one_of(
    st.sampled_from(["", "\udcff", "nan", "-inf", "\n99999999999999999999", "9" * 5000, "0x10", "1_0"]),
    st.integers().map(str),
    st.floats().map(str),
    st.text(st.characters(exclude_characters="\0"), max_size=20),
)


@settings(max_examples=300)
@given(flag=st.sampled_from(FLAGS), value=WORDS)
def test_a_value_is_taken_or_refused_in_one_line(flag: tuple[str, str, int], value: str) -> None:
    command, name, count = flag
    told = io.StringIO()
    arguments = [f"{name}={value}"] if count == 1 else [name, *[value] * count]
    status: object = 0
    with contextlib.redirect_stderr(told):
        try:
            MODULES[command].make_parser().parse_args(["--trace=x", *arguments])
        except SystemExit as exit:
            status = exit.code
    said = told.getvalue()
    assert status == (2 if said else 0)
    assert not said or (said.startswith(f"trunkline bench {command}: ") and said.count("\n") == 1)


def test_there_are_flags_to_look_at() -> None:
    assert len(FLAGS) > 30
    with pytest.raises(SystemExit):
        simulate.make_parser().parse_args(["--trace"])
