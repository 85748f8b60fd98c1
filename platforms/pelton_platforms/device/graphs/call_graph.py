"""Call graphs: the calls of a step on fixed addresses, recorded and replayed, for devices that compute in the calling process.

The calls run while they are recorded. Functions of C go through `launch`; torch's ops are seen by the recorder. What makes the
step's memory is recorded as well: tensors lie in the recorder's arena, which all call graphs share, so a replay allocates nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import Token
from enum import Enum
from functools import cache, partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from pelton import moved
from pelton.errors import EngineError
from pelton.graphs.recordable import home, reads_on_host, recording
from pelton.graphs.recorder import Graph, GraphRecorder

OLD_NAMES = {
    "Tape": f"{__name__}.CallGraph",
    "TapeRecorder": f"{__name__}.CallGraphRecorder",
    "launch": "pelton.graphs.recordable.launch",
}
if not TYPE_CHECKING:
    __getattr__ = moved.names_of(__name__, OLD_NAMES)

_EMPTY = ("aten.empty.memory_format", "aten.new_empty", "aten.empty_like", "aten.empty_strided")
_ALIGNMENT = 64
_LEAST_CHUNK = 2**21


class CallGraph:
    """Calls in the order of their capture; each returns 0 or None, or it failed."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], Any]] = []

    def replay(self) -> None:
        for call in self.calls:
            if call():
                raise EngineError("A step's kernel failed: it found no memory. Give the process more memory.")


class CallGraphRecorder(GraphRecorder):
    """A step that reads a value on the host (`item`) runs, and is refused at its `end`."""

    runs_calls: ClassVar[bool] = True

    def __init__(self) -> None:
        self._arena = _Arena()
        self._mode: _Watch | None = None
        self._token: Token[list[Callable[[], Any]] | None] | None = None

    def begin(self) -> None:
        assert self._mode is None, "a capture runs already"
        graph = CallGraph()
        self._arena.start()
        self._mode = _Watch(graph, self._arena)
        self._token = recording.set(graph.calls)
        self._mode.__enter__()  # type: ignore[no-untyped-call]

    def end(self) -> Graph:
        assert self._mode is not None, "no capture runs"
        mode = self._mode
        self.abort()
        if mode.refused is not None:
            raise EngineError(f"{mode.refused} reads values on the host while a step is recorded.")
        return mode.graph

    def abort(self) -> None:
        if self._mode is not None and self._token is not None:
            self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            recording.reset(self._token)
        self._mode = self._token = None


class _Kind(Enum):
    EMPTY, WRITE, OTHER = range(3)


@cache
def _kind(func: Any) -> _Kind:
    name, schema = str(func), func._schema
    if name.startswith(_EMPTY):
        return _Kind.EMPTY
    is_write = any(one.alias_info is not None and one.alias_info.is_write for one in schema.arguments)
    return _Kind.WRITE if is_write else _Kind.OTHER


class _Watch(TorchDispatchMode):
    """Records torch's ops, and puts their results into the arena."""

    def __init__(self, graph: CallGraph, arena: _Arena) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph, self._arena = graph, arena
        self.refused: str | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Not by a wrapper that imports torch's compiler: that takes a second at the start."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = _kind(func)
        if reads_on_host(func, args, kwargs):
            self.refused = str(func)
        result = func(*args, **(kwargs or {}))
        if kind is _Kind.EMPTY:
            place = home.get()
            if place is not None and place.shape == result.shape and place.dtype == result.dtype:
                home.set(None)
                return place
            return self._arena.like(result)
        if kind is _Kind.WRITE:
            self._record(func, args, kwargs, None)
            return result
        given = {one.untyped_storage().data_ptr() for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)}
        made = [one for one in tree_leaves(result) if isinstance(one, Tensor)]
        if not made or any(one.untyped_storage().data_ptr() in given for one in made):
            return result  # a view, whose address stays; its schema does not say: `to` and `reshape` may copy
        kept = tree_map_only(Tensor, lambda one: self._arena.like(one).copy_(one), result)
        self._record(
            func, args, kwargs, [self._arena.weak_ref(one) for one in tree_leaves(kept) if isinstance(one, Tensor)]
        )
        return kept

    def _record(self, func: Any, args: Any, kwargs: Any, results: list[Tensor] | None) -> None:
        args, kwargs = tree_map_only(Tensor, self._arena.weak_ref, (args, kwargs or {}))
        call = partial(func, *args, **kwargs)
        self.graph.calls.append(partial(_again, call, results))


def _again(call: Callable[[], Any], results: list[Tensor] | None) -> None:
    made = call()
    if results is not None:
        for old, new in zip(results, (one for one in tree_leaves(made) if isinstance(one, Tensor)), strict=True):
            old.copy_(new)


class _Piece(np.ndarray):
    """Memory of one tensor, which goes back to the arena with it."""

    give_back: Callable[[], None] | None = None

    def __del__(self) -> None:
        if self.give_back is not None:
            self.give_back()


class _Arena:
    """Memory for tensors that are made while recording. What one leaves is there for later ones, of later graphs too: they are
    replayed one after the other."""

    def __init__(self) -> None:
        self._chunks: list[tuple[Tensor, np.ndarray]] = []
        self._chunk = self._used = 0  # where the next tensor goes, in which chunk
        self._num_pieces = 0
        self._free: dict[int, list[tuple[int, int]]] = {}  # size -> (chunk, start)

    @property
    def num_bytes(self) -> int:
        return sum(chunk.numel() for chunk, _ in self._chunks)

    def start(self) -> None:
        """Begin the next graph: at the start of memory, where no tensor of an earlier one is left."""
        if not self._num_pieces:
            self._chunk = self._used = 0
            self._free.clear()

    def like(self, tensor: Tensor) -> Tensor:
        """One with its shape and dtype, and its strides where these leave no gaps; its numbers are undefined."""
        if not tensor.numel():
            return tensor
        flat = torch.from_numpy(self._take(tensor.numel() * tensor.element_size())).view(tensor.dtype)
        span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        return flat.as_strided(tensor.shape, tensor.stride()) if span == tensor.numel() else flat.view(tensor.shape)

    def weak_ref(self, tensor: Tensor) -> Tensor:
        """Return a tensor on the same memory, which is free for others as soon as its owner is gone; memory of others as it is."""
        address = tensor.untyped_storage().data_ptr()
        for chunk, _ in self._chunks:
            start = address - chunk.data_ptr()
            if 0 <= start < chunk.numel():
                part = chunk[start : start + tensor.untyped_storage().nbytes()].view(tensor.dtype)
                return part.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset() + part.storage_offset())
        return tensor

    def _take(self, num_bytes: int) -> np.ndarray:
        size = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        free = self._free.setdefault(size, [])
        chunk, start = free.pop() if free else self._carve(size)
        piece = self._chunks[chunk][1][start : start + num_bytes].view(_Piece)
        self._num_pieces += 1

        def give_back() -> None:
            self._num_pieces -= 1
            free.append((chunk, start))

        piece.give_back = give_back
        return piece

    def _carve(self, size: int) -> tuple[int, int]:
        while self._chunk < len(self._chunks) and self._used + size > self._chunks[self._chunk][0].numel():
            self._chunk, self._used = self._chunk + 1, 0
        if self._chunk == len(self._chunks):  # twice as large as the last: graphs for ever more rows take little in all
            last = self._chunks[-1][0].numel() if self._chunks else 0
            memory = torch.empty(max(size, 2 * last, _LEAST_CHUNK), dtype=torch.uint8)
            self._chunks.append((memory, memory.numpy()))
        start, self._used = self._used, self._used + size
        return self._chunk, start
