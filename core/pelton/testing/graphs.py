"""Graphs without a device: a recorder that keeps torch's ops, and attention that can be captured.

A replay runs the same ops on the same tensors and writes into the same results, as a captured graph does: what the
host decided at capture stays decided, and an address that is not filled again keeps its old values. So engine
tests of every graph mode run on a CPU, and find what a graph would get wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from pelton.attention.interface import AttentionBackend, AttentionNeeds, AttentionParams, BoundAttention, GraphSupport
from pelton.attention.metadata import BatchDescriptor, CommonMetadata
from pelton.graphs.recordable import reads_on_host
from pelton.graphs.recorder import Graph, GraphRecorder


class FakeGraph:
    """Ops in the order of their capture."""

    def __init__(self) -> None:
        self.ops: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], list[Tensor]]] = []
        self.num_replays = 0

    def replay(self) -> None:
        self.num_replays += 1
        for function, args, kwargs, results in self.ops:
            again = [leaf for leaf in tree_leaves(function(*args, **kwargs)) if isinstance(leaf, Tensor)]
            for old, new in zip(results, again, strict=True):
                if _memory_of(old) != _memory_of(new):
                    old.copy_(new)


def _memory_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class _Capture(TorchDispatchMode):
    """Runs each op once, for the shapes of its results, which a replay fills; `undo` takes back what it wrote."""

    def __init__(self, graph: FakeGraph) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph = graph
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def undo(self) -> None:
        for storage, saved in self._before.values():
            storage.copy_(saved)

    def save(self, tensor: Tensor) -> None:
        """Keep what is in its memory; `undo` puts it back."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._before:
            self._before[storage.data_ptr()] = storage, storage.clone()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if reads_on_host(func, args, kwargs):
            raise RuntimeError(f"{func} reads the device's values while a graph is captured")
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written = args[place] if place < len(args) else (kwargs or {}).get(argument.name)
                for tensor in tree_leaves(written):
                    self.save(tensor)
        result = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        # A replay of a view gives the same memory again. (`reshape` and the like may copy.)
        if not (func.is_view and all(_memory_of(tensor) == _memory_of(args[0]) for tensor in tensors)):
            self.graph.ops.append((func, args, kwargs or {}, tensors))
        return result


class FakeGraphRecorder(GraphRecorder):
    """Unlike a device's it runs what it records, and puts back at the end what that changed."""

    def __init__(self) -> None:
        self.graphs: list[FakeGraph] = []
        self._mode: _Capture | None = None

    def begin(self) -> None:
        assert self._mode is None, "a capture runs already"
        self._mode = _Capture(FakeGraph())
        self._mode.__enter__()  # type: ignore[no-untyped-call]

    def launch(self, call: Callable[[], None], tensors: Iterable[Tensor]) -> None:
        """Run what is none of torch's ops, such as an interpreted kernel; a capture keeps it. It may write to `tensors`."""
        mode = self._mode
        if mode is None:
            call()
            return
        with _disable_current_modes():
            for tensor in tensors:
                mode.save(tensor)
            call()
        mode.graph.ops.append((call, (), {}, []))

    def end(self) -> Graph:
        assert self._mode is not None, "no capture runs"
        mode, self._mode = self._mode, None
        mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        mode.undo()
        self.graphs.append(mode.graph)
        return mode.graph

    def abort(self) -> None:
        if self._mode is not None:
            self.end()
            self.graphs.pop()


class StaticAttention(AttentionBackend):
    """Every row against every token of its table, masked: shapes alone decide what is run."""

    name: ClassVar[str] = "static"
    handles: ClassVar[frozenset[str]] = frozenset({"sliding_window", "logit_soft_cap"})
    graph_support: ClassVar[GraphSupport] = GraphSupport.ALWAYS

    @classmethod
    def unsupported(cls, needs: AttentionNeeds, capability: tuple[int, int] | None = None) -> list[str]:
        return [] if needs.kv_dtype in ("auto", needs.dtype) else [f"kv dtype {needs.kv_dtype}, only the model's own"]

    def build(self, common: CommonMetadata, key: BatchDescriptor | None = None) -> CommonMetadata:
        return common

    def bind(self, layer: AttentionParams) -> BoundAttention:
        return StaticBound(layer)


class StaticBound(BoundAttention):
    """A layer's attention by `StaticAttention`."""

    layer: AttentionParams

    def __call__(self, query: Tensor, metadata: CommonMetadata, output: Tensor) -> None:
        layer = self.layer
        num_rows, num_tokens = metadata.num_reqs, query.shape[0]
        token = torch.arange(num_tokens)
        starts = metadata.query_start_loc.long()
        row = torch.searchsorted(starts[1:], token, right=True).clamp(max=num_rows - 1)
        length = metadata.seq_lens.long()[row]
        position = length - starts[row + 1] + token  # of the token in its row
        blocks = metadata.block_table.long()[row]  # [T, B]
        keys, values = (cache[blocks].flatten(1, 2).float() for cache in (layer.k_cache, layer.v_cache))  # [T, L, N, D]
        place = torch.arange(keys.shape[1])
        is_hidden = place > position[:, None]
        if layer.sliding_window is not None:
            is_hidden |= place <= position[:, None] - layer.sliding_window
        grouped = query.view(num_tokens, layer.num_kv_heads, -1, layer.head_dim).float()
        scores = torch.einsum("tngd,tlnd->tngl", grouped, keys) * layer.scale
        if layer.soft_cap is not None:
            scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
        weights = scores.masked_fill(is_hidden[:, None, None], -torch.inf).softmax(dim=-1)
        values = values.masked_fill(is_hidden[:, :, None, None], 0.0)
        attended = torch.einsum("tngl,tlnd->tngd", weights, values).reshape(output.shape)
        output.copy_(attended.to(output.dtype))
