"""Triton's interpreter without the work whose result it throws away. It takes about half of the time then."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np


def quicken(interpreter: Any) -> None:
    """Changes the module triton.runtime.interpreter of Triton 3.7. Results stay the same to the last bit."""
    tl, builder = interpreter.tl, interpreter.interpreter_builder
    # Of every sum, difference and product of integers it computes whether it overflows, and only in debug mode looks.
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    # It builds its table of all types whenever it needs one of them.
    interpreter._get_np_dtype = quick_lookup(interpreter._get_np_dtype, tl)
    # It searches all of triton.language for what it has to patch, for every kernel and again for every function that a
    # kernel calls, when everything is patched.
    interpreter._patch_builtin = quick_search(interpreter._patch_attr, tl)
    interpreter._patch_lang = quick_patch(interpreter._patch_lang, tl)
    # It makes views of both operands of the common shape, also where they have it.
    semantic = type(interpreter.interpreter_semantic)
    semantic.broadcast_impl_value = quick_broadcast(semantic.broadcast_impl_value)
    # Every tensor has a shape of its own, of wrapped numbers with types.
    tl.tensor.__init__ = quick_tensor(tl.tensor.__init__)


def quick_lookup(slow: Callable[[Any], np.dtype[Any]], tl: Any) -> Callable[[Any], np.dtype[Any]]:
    known: dict[str, np.dtype[Any]] = {}

    def quick(kind: Any) -> np.dtype[Any]:
        scalar = kind.scalar
        if isinstance(scalar, tl.pointer_type):
            return slow(scalar)
        found = known.get(scalar.name)
        if found is None:
            found = known[scalar.name] = slow(scalar)
        return found

    return quick


def quick_search(patch: Callable[..., None], tl: Any) -> Callable[..., None]:
    known: dict[Any, list[tuple[str, Any]]] = {}

    def quick(place: Any, builder: Any, scope: Any) -> None:
        if place not in known:
            known[place] = [(name, found) for name, found in inspect.getmembers(place) if tl.core.is_builtin(found)]
        for name, builtin in known[place]:
            if getattr(place, name) is builtin:
                patch(place, name, builtin, builder, scope)

    return quick


def quick_patch(slow: Callable[[Any], Any], tl: Any) -> Callable[[Any], Any]:
    patched: set[int] = set()

    class Nothing:
        def restore(self) -> None:
            pass

    def quick(function: Any) -> Any:
        found = {id(tl), id(tl.core)} & set(map(id, function.__globals__.values()))
        if found <= patched:
            return Nothing()
        scope = slow(function)
        patched.update(found)
        restore = scope.restore

        def forget_and_restore() -> None:
            patched.clear()
            restore()

        scope.restore = forget_and_restore
        return scope

    return quick


def quick_broadcast(slow: Callable[[Any, Any, Any], Any]) -> Callable[[Any, Any, Any], Any]:
    def quick(self: Any, left: Any, right: Any) -> Any:
        kinds = left.type, right.type
        if all(kind.is_block() for kind in kinds) and kinds[0].shape == kinds[1].shape:
            return left, right
        return slow(self, left, right)

    return quick


def quick_tensor(slow: Callable[[Any, Any, Any], None]) -> Callable[[Any, Any, Any], None]:
    known: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def quick(self: Any, handle: Any, type: Any) -> None:
        shape = type.shape if type.is_block() else ()
        if shape not in known:
            slow(self, handle, type)
            known[shape] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = known[shape]

    return quick
