"""Accesses of kernels in Triton's interpreter that lie in no tensor are faults: a GPU reads what is before a buffer where something is
mapped there, and ends the process where nothing is.

An address that no mask leaves out lies in the storage of one of the launch's tensors, or, where one of these holds addresses, in that of a
tensor which it names and whose `data_ptr` somebody asked for. What is read elsewhere in the same storage is not found: tests that look
for it give views that begin or end with their storage.
"""

from __future__ import annotations

import bisect
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

address_of = torch.Tensor.data_ptr
_LEAST, _GREATEST = np.minimum.reduce, np.maximum.reduce
_known: dict[int, int] = {}
"""Ends of storages by their addresses: of tensors whose address was asked for, each as it was last."""


class Launch:
    """Where one launch may read and write."""

    def __init__(self, kernel: str, arguments: dict[str, Any]) -> None:
        self.kernel = kernel
        self.arguments: dict[str, tuple[int, int, int]] = {}  # start and end of its storage, its own address
        self._tables: list[torch.Tensor] = []
        for name, value in arguments.items():
            self._add(name, value)
        ends = {start: end for start, end, _ in self.arguments.values() if end > start}
        self._starts = sorted(ends)
        self._ends = [ends[start] for start in self._starts]

    def _add(self, name: str, value: Any) -> None:
        if isinstance(value, tuple):
            for index, one in enumerate(value):
                self._add(f"{name}[{index}]", one)
        elif hasattr(value, "base"):  # a descriptor, or a tensor of another dtype
            self._add(name, value.base)
        elif isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            start = storage.data_ptr()
            self.arguments[name] = start, start + storage.nbytes(), address_of(value)
            if value.dtype == torch.int64:
                self._tables.append(value)

    def look_at(self, places: Any, mask: Any, size: int, what: str) -> None:
        """Raise where a place that `mask` has is not one of the launch's. Most often all lie in one storage, those left out too."""
        if places.size < 2:
            if not places.size or self._has(first := places.item(), first + size):
                return
        elif self._has(int(_LEAST(places, axis=None)), int(_GREATEST(places, axis=None)) + size):
            return
        chosen = places[np.broadcast_to(mask, places.shape)] if mask is not None else places.ravel()
        outside = self._outside(chosen, size)
        if outside.size and self._tables:
            self._look_up_tables()
            outside = self._outside(outside, size)
        if outside.size:
            raise IndexError(f"{self.kernel}: {what} of {size} bytes {self._named(int(outside.min()))}")

    def _outside(self, places: Any, size: int) -> Any:
        """Return those of `places` that are in no storage."""
        if not self._starts:
            return places
        index = np.searchsorted(np.array(self._starts, np.uint64), places, side="right")
        ends = np.array([0, *self._ends], np.uint64)  # of what lies before the first one: none
        return places[places + np.uint64(size) > ends[index]]

    def _look_up_tables(self) -> None:
        """Add the storages that the launch's tables name."""
        starts = np.array(sorted(_known))
        for table in self._tables:
            held = table.untyped_storage()
            numbers = np.unique(torch.empty(0, dtype=torch.int64).set_(held, 0, (held.nbytes() // 8,)).numpy())
            found = np.searchsorted(starts, numbers, side="right") - 1
            for start in {int(starts[index]) for index in np.unique(found) if index >= 0}:
                if np.any((numbers >= start) & (numbers < _known[start])) and start not in self._starts:
                    index = bisect.bisect(self._starts, start)
                    self._starts.insert(index, start)
                    self._ends.insert(index, _known[start])
        self._tables.clear()

    def _has(self, first: int, end: int) -> bool:
        index = bisect.bisect_right(self._starts, first) - 1
        return index >= 0 and end <= self._ends[index]

    def _named(self, place: int) -> str:
        if not self.arguments:
            return f"at {place:#x}, without a tensor"

        def distance(bounds: tuple[int, int, int]) -> int:
            start, end, _ = bounds
            return start - place if place < start else place - end

        name = min(self.arguments, key=lambda name: distance(self.arguments[name]))
        start, end, own = self.arguments[name]
        side = f"{start - place} before the beginning" if place < start else f"{place - end} behind the end"
        return f"at {place - own:+} of {name}, {side} of its storage of {end - start} bytes"


def look_at_addresses() -> None:
    """Once a process, where kernels are interpreted."""
    from triton.runtime import interpreter

    plain, call = interpreter._interpreter, interpreter.GridExecutor.__call__
    launches: list[Launch] = []

    def load(places: Any, mask: Any, other: Any, dtype: Any) -> Any:
        launches[-1].look_at(places, mask, dtype.itemsize, "load")
        return plain.load(places, mask, other, dtype)

    def store(places: Any, value: Any, mask: Any) -> Any:
        launches[-1].look_at(places, mask, value.dtype.itemsize, "store")
        return plain.store(places, value, mask)

    def atomic_rmw(operation: Any, places: Any, value: Any, mask: Any, order: Any) -> Any:
        launches[-1].look_at(places, mask, value.dtype.itemsize, "atomic")
        return plain.atomic_rmw(operation, places, value, mask, order)

    def atomic_cas(places: Any, expected: Any, value: Any, order: Any) -> Any:
        launches[-1].look_at(places, None, value.dtype.itemsize, "atomic")
        return plain.atomic_cas(places, expected, value, order)

    def call_and_look(self: Any, *args: Any, **kwargs: Any) -> Any:
        launches.append(Launch(self.fn.__name__, dict(zip(self.arg_names, args, strict=False)) | kwargs))
        try:
            return call(self, *args, **kwargs)
        finally:
            launches.pop()

    def note(self: torch.Tensor) -> int:
        storage = self.untyped_storage()
        start = storage.data_ptr()
        _known[start] = start + storage.nbytes()
        return address_of(self)

    names = {name: getattr(plain, name) for name in dir(plain) if not name.startswith("__")}
    own = {"load": load, "store": store, "atomic_rmw": atomic_rmw, "atomic_cas": atomic_cas}
    interpreter._interpreter = SimpleNamespace(**names | own)
    interpreter.GridExecutor.__call__ = call_and_look
    torch.Tensor.data_ptr = note  # type: ignore[method-assign]
