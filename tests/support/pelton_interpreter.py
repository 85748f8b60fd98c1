"""Triton's interpreter (3.6), mended where it is wrong and made quick where it repeats itself.

What it computes stays its own. Most of its time goes into bookkeeping of its own: it patches `triton.language` anew for every
call of a device function, counts integer sums a second time for an assertion that is off, and looks at the types of both operands
anew for every operator (pelton_interpreter_ops.py).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch


@functools.cache
def mend() -> None:
    """After TRITON_INTERPRET is set and before a kernel runs; what is done is done once a process."""
    from pelton_interpreter_bounds import look_at_addresses
    from pelton_interpreter_ops import intern_types, look_before, share_facts

    _let_scalars_bound_loops()
    _round_to_nearest()
    _patch_once_a_launch()
    _count_no_overflow()
    _look_up_dtypes()
    intern_types()
    share_facts()
    look_before()
    _broadcast_what_differs()
    look_at_addresses()


def _let_scalars_bound_loops() -> None:
    """A loop's bound is made with `int` of a one-element array, which numpy 2.4 refuses."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_and_mend(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_and_mend


def _round_to_nearest() -> None:
    """As the device does: the interpreter cuts off. It also reads e4m3's NaN as 480. A number of bfloat16 is the upper half of one of
    float32, which it makes of sign, exponent and digits."""
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def mended(numbers: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source.is_bf16() and target.is_fp32():
            return numbers.astype(np.uint32) << 16
        if source.is_fp32() and (target.is_fp8e4nv() or target.is_bf16()):
            wide = torch.from_numpy(np.ascontiguousarray(numbers).view(np.float32))
            if target.is_bf16():
                return wide.bfloat16().view(torch.int16).numpy().view(np.uint16).reshape(numbers.shape)
            return wide.to(torch.float8_e4m3fn).view(torch.uint8).numpy().reshape(numbers.shape)
        result = convert(numbers, source, target, rounding)
        if source.is_fp8e4nv() and target.is_fp32():
            result = result.view(np.float32)
            result[(numbers & 0x7F) == 0x7F] = np.nan
            result = result.view(np.uint32)
        return result

    interpreter._convert_float = mended


def _patch_once_a_launch() -> None:
    """Device functions run while the kernel that calls them has `triton.language` patched. What is put in its place is found once."""
    import triton.language as tl
    from pelton_interpreter_ops import call_at_once, quick_functions, quick_operators
    from triton.runtime import interpreter

    patch = interpreter._patch_lang
    everything = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    changes: list[tuple[Any, str, Any, Any]] = []
    active: list[Any] = []

    def find_changes() -> None:
        scope = patch(everything)
        for owner, name, _ in list(scope._changes):
            scope.set_attr(owner, name, call_at_once(getattr(owner, name)))
        for owners, made in (((tl.tensor,), quick_operators()), ((tl, tl.core), quick_functions())):
            for owner, (name, function) in itertools.product(owners, made.items()):
                scope.set_attr(owner, name, function)
        first = {}
        for owner, name, original in scope._changes:
            first.setdefault((id(owner), name), (owner, name, original))
        changes.extend((owner, name, original, getattr(owner, name)) for owner, name, original in first.values())
        scope.restore()

    class Scope:
        def __init__(self) -> None:
            for owner, name, _, new in changes:
                setattr(owner, name, new)

        def restore(self) -> None:
            active.clear()
            for owner, name, original, _ in changes:
                if original is interpreter._MISSING:
                    delattr(owner, name)
                else:
                    setattr(owner, name, original)

    def patch_lang(function: Any) -> Any:
        if not changes:
            find_changes()
        if not active:
            active.append(Scope())
        return active[0]

    interpreter._patch_lang = patch_lang


def _count_no_overflow() -> None:
    """Its outcome is given to a device assertion, which is off unless `debug` is on."""
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def _look_up_dtypes() -> None:
    """Each look-up makes the whole table."""
    import triton.language as tl
    from triton.runtime import interpreter

    plain = interpreter._get_np_dtype
    known: dict[str, Any] = {}

    def np_dtype(given: Any) -> Any:
        element = given.element_ty if isinstance(given, tl.block_type) else given
        found = known.get(element.name)
        if found is None:
            found = known[element.name] = plain(given)
        return found

    interpreter._get_np_dtype = np_dtype


def _broadcast_what_differs() -> None:
    """Of two values of one shape neither is broadcast. (Shapes are shared: see above.)"""
    import triton.language as tl
    from triton.language.semantic import TritonSemantic

    plain = TritonSemantic.broadcast_impl_value

    def broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
        if isinstance(lhs, tl.tensor) and isinstance(rhs, tl.tensor) and lhs.shape is rhs.shape:
            return lhs, rhs
        return plain(self, lhs, rhs)

    TritonSemantic.broadcast_impl_value = broadcast
