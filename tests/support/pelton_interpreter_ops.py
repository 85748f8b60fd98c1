"""Operators of values in Triton's interpreter, in one step where it takes forty.

An operator checks its operands' types, casts and broadcasts both, makes handles, and does all of it again for the next two values of
the same types. Here a pair of types is looked at once, by Triton's own rules; then numpy is given both arrays, which it broadcasts
itself. Types of which nothing is known here (bfloat16, eight bits) and what Triton refuses go the long way, every time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from operator import methodcaller
from typing import Any, NamedTuple

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

Operator = Callable[..., Any]

NUMBERS = (
    tl.int8, tl.int16, tl.int32, tl.int64, tl.uint8, tl.uint16, tl.uint32, tl.uint64, tl.float16, tl.float32, tl.float64
)  # fmt: skip
"""Those that numpy has as they are."""


def _divide_down(left: Any, right: Any) -> Any:
    return (left - np.fmod(left, right)) // right


COMPARISONS: dict[str, Any] = {
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal, "ne": np.not_equal,
}  # fmt: skip
LOGIC: dict[str, Any] = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
OF_INTEGERS: dict[str, Any] = {"floordiv": _divide_down, "lshift": np.left_shift, "rshift": np.right_shift, **LOGIC}
DIVISIONS: dict[str, Any] = {"truediv": np.divide, "floordiv": _divide_down, "mod": np.fmod}
OPERATIONS = {"add": np.add, "sub": np.subtract, "mul": np.multiply} | COMPARISONS | OF_INTEGERS | DIVISIONS
REFLECTED = ("add", "sub", "mul", "truediv", "floordiv", "mod", *LOGIC)

_new = object.__new__
_tensor, _handle = tl.tensor, interpreter.TensorHandle
_facts: dict[int, Any] = {}
_sizes: dict[tuple[int, ...], Any] = {}


def facts_of(type: Any) -> Any:
    """The number of elements, the shape and the scalar type of a value of this type; which lives as long as they do, so that its id
    is its own."""
    found = _facts.get(id(type))
    if found is None:
        shape = tuple(type.shape.values) if type.is_block() else ()
        if shape not in _sizes:
            _sizes[shape] = tl.constexpr(math.prod(shape)), tl.tuple([tl.constexpr(size) for size in shape])
        found = _facts[id(type)] = *_sizes[shape], type.scalar, type
    return found


def make_value(data: Any, element: Any, type: Any) -> Any:
    """As `tl.tensor(TensorHandle(data, element), type)` does."""
    handle = _new(_handle)
    handle.data, handle.dtype, handle.attr = data, element, {}
    made = _new(_tensor)
    made.handle, made.type = handle, type
    made.numel, made.shape, made.dtype, _ = facts_of(type)
    return made


def share_facts() -> None:
    """Of a type, among all of its values."""

    def init(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type = handle, type
        self.numel, self.shape, self.dtype, _ = facts_of(type)

    _tensor.__init__ = init


def intern_types() -> None:
    """One object a type: blocks of the same elements and sizes, pointers to the same."""
    for kind in (tl.block_type, tl.pointer_type):
        _intern(kind, kind.__init__)


def _intern(kind: Any, plain: Any) -> None:
    known: dict[Any, Any] = {}

    def key_of(element_ty: Any, *rest: Any, **named: Any) -> Any:
        element = element_ty.value if isinstance(element_ty, tl.constexpr) else element_ty
        if kind is tl.block_type:
            (sizes,) = rest or named.values()
            return id(element), *(size.value if isinstance(size, tl.constexpr) else size for size in sizes)
        return id(element), rest, tuple(named.items())

    def new(cls: Any, *args: Any, **named: Any) -> Any:
        found = known.get(key_of(*args, **named)) if cls is kind else None
        return _new(cls) if found is None else found

    def init(self: Any, *args: Any, **named: Any) -> None:
        if "name" not in self.__dict__:
            plain(self, *args, **named)
            if type(self) is kind:
                known[key_of(*args, **named)] = self

    kind.__new__, kind.__init__ = staticmethod(new), init


class Plan(NamedTuple):
    """What an operator does with values of two types."""

    operation: Any
    casts: tuple[Any, Any]
    element: Any  # of the result's handle
    result: Any


def _plan_of(name: str, left: Any, right: Any, element: Any) -> Plan | None:
    """For types of which `element` is computed with; None: the long way."""
    scalars = left.scalar, right.scalar
    if element in NUMBERS:
        known = all(one in NUMBERS or one == tl.int1 for one in scalars)
    else:
        known = name in COMPARISONS | LOGIC and scalars == (tl.int1, tl.int1)
    if name in OF_INTEGERS:
        known = known and element.is_int()
    if name == "rshift":
        known = known and element.int_signedness == left.scalar.int_signedness
    if name == "truediv":
        known = known and element.is_floating()
    shape = _shape_of_both(left, right)
    if not known or shape is None:
        return None
    target = interpreter._get_np_dtype(element)
    casts = tuple(None if one == element else target for one in scalars)
    return Plan(OPERATIONS[name], casts, element, _type_of(tl.int1 if name in COMPARISONS else element, shape))


def _type_of(scalar: Any, shape: tuple[int, ...]) -> Any:
    return tl.block_type(scalar, list(shape)) if shape else scalar


def _shape_of_both(left: Any, right: Any) -> tuple[int, ...] | None:
    try:
        return np.broadcast_shapes(*(tuple(one.shape.values) if one.is_block() else () for one in (left, right)))
    except ValueError:
        return None


def _plan_of_types(name: str, left: Any, right: Any) -> Plan | None:
    if left.scalar.is_ptr() and name == "add":
        return _plan_of_places(left, right)
    try:
        element = interpreter.interpreter_semantic.computation_type_impl(
            left.scalar, False, right.scalar, False, name in DIVISIONS
        )
    except (TypeError, AttributeError):
        return None
    return _plan_of(name, left, right, element)


def _plan_of_places(left: Any, right: Any) -> Plan | None:
    """Of a pointer and a distance in elements."""
    shape = _shape_of_both(left, right)
    if not right.scalar.is_int() or shape is None or left.scalar.element_ty.is_block():
        return None
    size = max(1, left.scalar.element_ty.primitive_bitwidth // 8)

    def behind(places: Any, distance: Any) -> Any:
        return places + size * distance

    return Plan(behind, (None, np.uint64), left.scalar, _type_of(left.scalar, shape))


def _plan_of_number(name: str, type: Any, number: Any, is_reflected: bool) -> tuple[Plan, Any] | None:
    """With the number as an array of what is computed with."""
    semantic = interpreter.interpreter_semantic
    try:
        own = semantic.to_tensor(number)
        if name in COMPARISONS or type.scalar.is_ptr():  # which make a value of it first
            plan = None if is_reflected else _plan_of_types(name, type, own.type)
        else:
            element = semantic.computation_type_impl(type.scalar, False, own.type, True, name in DIVISIONS)
            if element.is_int() and not element.get_int_min_value() <= number <= element.get_int_max_value():
                return None
            own = semantic.scalar_constant(number, element)
            types = (own.type, type) if is_reflected else (type, own.type)
            plan = _plan_of(name, *types, element)
    except (TypeError, ValueError, AttributeError):
        return None
    if plan is None:
        return None
    target = plan.casts[0 if is_reflected else 1]
    return plan, own.handle.data if target is None else own.handle.data.astype(target)


def quick(name: str, slow: Operator, *, is_reflected: bool = False) -> Operator:
    """The operator `name` of values; `slow`: the long way."""
    plans: dict[Any, Any] = {}
    constants: dict[Any, Any] = {}
    own_cast = 1 if is_reflected else 0

    def operator(self: Any, other: Any) -> Any:
        kind = type(other)
        if kind is _tensor and not is_reflected:
            key = id(self.type), id(other.type)
            plan = plans.get(key, 0)
            if plan == 0:
                plan = plans[key] = _plan_of_types(name, self.type, other.type)
            if plan is None:
                return slow(self, other)
            operation, (first, second), element, result = plan
            left, right = self.handle.data, other.handle.data
            if first is not None:
                left = left.astype(first)
            if second is not None:
                right = right.astype(second)
        elif kind is int or kind is float or kind is bool:
            key = id(self.type), kind, other
            found = constants.get(key, 0)
            if found == 0:
                found = constants[key] = _plan_of_number(name, self.type, other, is_reflected)
            if found is None:
                return slow(self, other)
            (operation, casts, element, result), right = found
            left = self.handle.data
            if casts[own_cast] is not None:
                left = left.astype(casts[own_cast])
            if is_reflected:
                left, right = right, left
        else:
            return slow(self, other)
        return make_value(operation(left, right), element, result)

    return operator


def quick_operators() -> dict[str, Operator]:
    """Attributes of `tl.tensor`, while it is patched for the interpreter."""
    names = {f"__{name}__": (name, False) for name in OPERATIONS} | {f"__r{name}__": (name, True) for name in REFLECTED}
    found = {
        attribute: quick(name, getattr(_tensor, attribute), is_reflected=is_reflected)
        for attribute, (name, is_reflected) in names.items()
    }
    return found | {"__getitem__": quick_views(_tensor.__getitem__), "to": quick_casts(_tensor.to)}


def quick_views(slow: Operator) -> Operator:
    """`x[:, None]`: axes of one element."""
    plans: dict[Any, Any] = {}

    def plan_of(type: Any, index: Any) -> Any:
        is_known = type.is_block() and all(one is None or one == slice(None) for one in index)
        if not is_known or sum(one is not None for one in index) != len(type.shape):
            return None
        return tl.block_type(type.scalar, list(np.empty(tuple(type.shape.values), np.bool_)[index].shape))

    def view(self: Any, index: Any) -> Any:
        own = index if type(index) is tuple else (index,)
        if not all(one is None or type(one) is slice for one in own):
            return slow(self, index)
        key = id(self.type), tuple(one is None or (one.start, one.stop, one.step) for one in own)
        plan = plans.get(key, 0)
        if plan == 0:
            plan = plans[key] = plan_of(self.type, own)
        return slow(self, index) if plan is None else make_value(self.handle.data[own], self.handle.dtype.scalar, plan)

    return view


def quick_casts(slow: Operator) -> Operator:
    """`x.to(dtype)` among types that numpy has, and of bfloat16 from and to float32."""
    plans: dict[Any, Any] = {}

    def plan_of(type: Any, target: Any) -> Any:
        source = type.scalar
        if (source, target) in ((tl.bfloat16, tl.float32), (tl.float32, tl.bfloat16)):
            convert: Any = lambda data: interpreter._convert_float(data, source, target, None).view(kind)  # noqa: E731
        elif (
            target not in NUMBERS
            or not (source in NUMBERS or source == tl.int1)
            or (source == tl.float16 and target != tl.float32)
        ):
            return None
        else:
            convert = methodcaller("astype", interpreter._get_np_dtype(target))
        kind = interpreter._get_np_dtype(target)
        return convert, type.with_element_ty(target) if type.is_block() else target

    def cast(self: Any, *args: Any, **options: Any) -> Any:
        if options or len(args) != 1 or type(args[0]) is not tl.dtype:
            return slow(self, *args, **options)
        (target,) = args
        if self.dtype is target:
            return self
        key = id(self.type), target.name
        plan = plans.get(key, 0)
        if plan == 0:
            plan = plans[key] = plan_of(self.type, target)
        return slow(self, target) if plan is None else make_value(plan[0](self.handle.data), target, plan[1])

    return cast


def quick_where(slow: Operator) -> Operator:
    """`tl.where` of a condition and two values, or a value and a number."""
    plans: dict[Any, Any] = {}

    def plan_of(condition: Any, given: tuple[Any, Any]) -> Any:
        """The result's type, and both sides: an array, or what it is cast to."""
        types = [one.scalar for one in given if not isinstance(one, (int, float))]
        if condition.scalar != tl.int1 or not all(one in NUMBERS or one == tl.int1 for one in types):
            return None
        sides = [one if isinstance(one, (int, float)) else tl.tensor(_nothing(one), one) for one in given]
        try:
            both = interpreter.interpreter_semantic.binary_op_type_checking_impl(*sides, True, True)
        except (TypeError, ValueError, AttributeError):
            return None
        element = both[0].dtype
        if element not in NUMBERS and element != tl.int1:
            return None
        shape = _shape_of_both(condition, both[0].type)
        if shape is None:
            return None
        target = interpreter._get_np_dtype(element)
        made = []
        for one in given:
            if isinstance(one, (int, float)):
                made.append((interpreter.interpreter_semantic.scalar_constant(one, element).handle.data, None))
            else:
                made.append((None, None if one.scalar == element else target))
        return _type_of(element, shape), element, made

    def where(condition: Any, x: Any, y: Any) -> Any:
        kinds = type(x), type(y)
        if type(condition) is not _tensor or not set(kinds) <= {_tensor, int, float}:
            return slow(condition, x, y)
        given = tuple(one.type if type(one) is _tensor else one for one in (x, y))
        key = (
            id(condition.type),
            kinds,
            *(id(one) if kind is _tensor else one for one, kind in zip(given, kinds, strict=True)),
        )
        plan = plans.get(key, 0)
        if plan == 0:
            plan = plans[key] = plan_of(condition.type, given)
        if plan is None:
            return slow(condition, x, y)
        result, element, ((left, first), (right, second)) = plan
        if left is None:
            left = x.handle.data if first is None else x.handle.data.astype(first)
        if right is None:
            right = y.handle.data if second is None else y.handle.data.astype(second)
        return make_value(np.where(condition.handle.data, left, right), element, result)

    return where


def _nothing(type: Any) -> Any:
    """The handle of a value of this type whose numbers nobody asks for."""
    shape = tuple(type.shape.values) if type.is_block() else (1,)
    return _handle(np.zeros(shape, interpreter._get_np_dtype(type)), type.scalar)


def quick_load(slow: Operator) -> Operator:
    """`tl.load` through pointers, with a mask of their shape or less."""
    plans: dict[Any, Any] = {}
    semantic = interpreter.interpreter_semantic

    def plan_of(places: Any, mask: Any, other: Any) -> Any:
        """The result's type and scalar, whether the mask is broadcast to the places, what is read for other ones."""
        if not places.scalar.is_ptr() or places.scalar.element_ty.is_block() or places.scalar.element_ty == tl.int1:
            return None
        element = places.scalar.element_ty
        shape = tuple(places.shape.values) if places.is_block() else ()
        if mask is not None and (mask.scalar != tl.int1 or _shape_of_both(places, mask) != shape):
            return None
        number = 0 if other is None else semantic.cast(semantic.to_tensor(other), element).handle.data
        others = np.full(shape or (1,), number, interpreter._get_np_dtype(element))
        is_narrow = mask is not None and (tuple(mask.shape.values) if mask.is_block() else ()) != shape
        return _type_of(element, shape), element, others, np.ones(shape or (1,), np.bool_), is_narrow, others.dtype

    def load(pointer: Any, mask: Any = None, other: Any = None, **options: Any) -> Any:
        is_known = type(pointer) is _tensor and (mask is None or type(mask) is _tensor)
        if not is_known or not (other is None or type(other) in (int, float)) or (other is not None and mask is None):
            return slow(pointer, mask, other, **options)
        if "boundary_check" in options or "padding_option" in options:
            return slow(pointer, mask, other, **options)
        key = id(pointer.type), mask if mask is None else id(mask.type), type(other), other
        plan = plans.get(key, 0)
        if plan == 0:
            plan = plans[key] = plan_of(pointer.type, None if mask is None else mask.type, other)
        if plan is None:
            return slow(pointer, mask, other, **options)
        result, element, others, all_of_them, is_narrow, kind = plan
        places = pointer.handle.data
        chosen = all_of_them if mask is None else mask.handle.data
        if is_narrow:
            chosen = np.broadcast_to(chosen, places.shape)
        return make_value(interpreter._interpreter.load(places, chosen, others, kind), element, result)

    return load


def quick_functions() -> dict[str, Operator]:
    """Attributes of `tl` and of `tl.core`, while they are patched for the interpreter."""
    return {"where": quick_where(tl.where), "load": quick_load(tl.load)}


def look_before() -> None:
    """At what most values are, before they are asked all else."""
    kind = type(interpreter.interpreter_semantic)
    to_tensor, cast, check = kind.to_tensor, kind.cast, kind.binary_op_type_checking_impl
    with_element_ty = tl.block_type.with_element_ty
    known: dict[Any, Any] = {}

    def quick_to_tensor(self: Any, x: Any, check_type: bool = True) -> Any:
        return x if type(x) is _tensor else to_tensor(self, x, check_type)

    def quick_cast(self: Any, input: Any, dst_ty: Any, *rest: Any) -> Any:
        return input if input.dtype is dst_ty else cast(self, input, dst_ty, *rest)

    def quick_check(self: Any, lhs: Any, rhs: Any, *rest: Any, **named: Any) -> Any:
        if not (rest or named) and type(lhs) is type(rhs) is _tensor and lhs.type is rhs.type and lhs.dtype in NUMBERS:
            return lhs, rhs
        return check(self, lhs, rhs, *rest, **named)

    def quick_type(self: Any, scalar_ty: Any) -> Any:
        key = id(self), id(scalar_ty)
        found = known.get(key)
        if found is None:
            made = with_element_ty(self, scalar_ty)
            found = known[key] = made, self, scalar_ty  # which live, so that ids are theirs
        return found[0]

    kind.to_tensor, kind.cast, kind.binary_op_type_checking_impl = quick_to_tensor, quick_cast, quick_check
    tl.block_type.with_element_ty = quick_type


def call_at_once(new: Operator) -> Operator:
    """A builtin of the language as the interpreter patches it: behind two functions that look at `_semantic`."""
    member = (getattr(new, "__kwdefaults__", None) or {}).get("member")
    plain = getattr(member, "__wrapped__", None)
    if plain is None or not tl.core.is_builtin(member):
        return new
    semantic = interpreter.interpreter_semantic

    def call(*args: Any, _semantic: Any = None, **options: Any) -> Any:
        return plain(*args, _semantic=semantic, **options)

    return call
