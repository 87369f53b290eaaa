"""Kernels in the lighter interpreter of tests: see tests/interpreter.py."""

import dataclasses
import inspect
from typing import Any

import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

from trunkline_kernels.gpu.rms_norm import rms_norm


def _normed() -> torch.Tensor:
    """From a kernel that calls a function of Triton's language."""
    torch.manual_seed(3)
    return rms_norm(torch.randn(5, 24), torch.randn(24), 1e-6)


def _members() -> dict[str, Any]:
    return {f"{owner}.{name}": member for owner in (tl, tl.tensor) for name, member in inspect.getmembers(owner)}


def _as_triton_does(package: Any, builder: Any, scope: Any) -> None:
    for name, member in inspect.getmembers(package):
        if tl.core.is_builtin(member):
            interpreter._patch_attr(package, name, member, builder, scope)


def test_it_gives_the_bits_of_tritons_own_and_restores_the_language(monkeypatch: pytest.MonkeyPatch) -> None:
    before, builder = _members(), interpreter.interpreter_builder
    lighter = _normed()
    assert _members() == before
    assert not builder.options.sanitize_overflow, "this is the lighter one"
    monkeypatch.setattr(builder, "options", dataclasses.replace(builder.options, sanitize_overflow=True))
    monkeypatch.setattr(interpreter, "_patch_builtin", _as_triton_does)
    assert torch.equal(_normed(), lighter)
