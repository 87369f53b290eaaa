"""Kernels that are launched before their inputs are there wait for them first."""

import ast
import importlib
import pkgutil
from pathlib import Path

import pytest

import trunkline_kernels.gpu
from trunkline_kernels.gpu.dependent_launch import VARIABLE, is_offered, launch_options


@pytest.mark.parametrize(
    ("capability", "is_nvidia", "expected"),
    [((8, 0), True, False), ((8, 9), True, False), ((9, 0), True, True), ((10, 0), True, True), ((9, 4), False, False)],
)
def test_only_devices_that_can_launch_so(
    capability: tuple[int, int], is_nvidia: bool, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert is_offered(capability, is_nvidia=is_nvidia) == expected
    monkeypatch.setenv(VARIABLE, "off")
    assert not is_offered(capability, is_nvidia=is_nvidia)


def test_a_setting_that_is_none_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "0")
    with pytest.raises(ValueError, match=f"{VARIABLE} is '0': it may be auto or off"):
        is_offered((9, 0), is_nvidia=True)


def test_other_backends_hear_nothing_of_it() -> None:
    assert launch_options(False) == {}


def kernels() -> list[ast.FunctionDef]:
    """Functions of trunkline_kernels.gpu that may be launched so."""
    found = []
    for info in pkgutil.iter_modules(trunkline_kernels.gpu.__path__):
        module = importlib.import_module(f"trunkline_kernels.gpu.{info.name}")
        assert module.__file__ is not None
        for node in ast.walk(ast.parse(Path(module.__file__).read_text())):
            if isinstance(node, ast.FunctionDef) and any(a.arg == "DEPENDENT" for a in node.args.args):
                found.append(node)
    return [node for node in found if node.name != "wait_for_inputs"]


def touches_memory(node: ast.AST) -> bool:
    calls = [found.func for found in ast.walk(node) if isinstance(found, ast.Call)]
    return any(isinstance(call, ast.Attribute) and call.attr in ("load", "store", "atomic_add") for call in calls)


def test_they_wait_before_they_touch_memory_and_before_they_may_end() -> None:
    assert {node.name for node in kernels()} == {
        "_rms_norm", "_rotary_kv", "_attend_ranges", "_silu_and_mul",
        "_persistent_matmul", "_quantize_rows", "_choose_experts", "_arrange_tiles", "_expert_product", "_sum_experts",
    }  # fmt: skip
    for node in kernels():
        waits = [at for at, line in enumerate(node.body) if ast.unparse(line) == "wait_for_inputs(DEPENDENT)"]
        assert len(waits) == 1, f"{node.name} waits {len(waits)} times"
        for line in node.body[: waits[0]]:
            assert not touches_memory(line), f"{node.name}: {ast.unparse(line)}"
            assert not any(isinstance(found, ast.Return) for found in ast.walk(line)), node.name
