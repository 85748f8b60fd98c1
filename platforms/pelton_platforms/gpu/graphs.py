"""CUDA graphs, recorded on the worker's stream."""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch

from pelton.graphs.recorder import Graph, GraphRecorder
from pelton.logging import get_logger

logger = get_logger(__name__)


class _Memory:
    """Device memory that somebody else owns, for `torch.as_tensor`."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,), "typestr": "|u1", "data": (address, False), "strides": None, "version": 3,
        }  # fmt: skip


class CUDAGraphRecorder(GraphRecorder):
    """All graphs share one pool: what one leaves there is read before the next one runs. Memory of tensors that are dropped
    in a capture is used again by later ones; what the captured call returns and somebody keeps stays."""

    def __init__(self, debug_dump_path: str | None = None) -> None:
        """debug_dump_path: a folder in which each graph's nodes are written, in the language of Graphviz."""
        self._pool = torch.cuda.graph_pool_handle()
        self._graph: torch.cuda.CUDAGraph | None = None
        self._dump_folder = None if debug_dump_path is None else Path(debug_dump_path)
        self._num_graphs = 0

    def begin(self) -> None:
        assert self._graph is None, "a capture runs already"
        self._graph = torch.cuda.CUDAGraph(keep_graph=self._dump_folder is not None)
        # Calls that a capture forbids (a copy that waits, an event query) are forbidden to this thread, not to others.
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def end(self) -> Graph:
        graph = self._graph
        assert graph is not None, "end without begin"
        graph.capture_end()
        self._graph = None  # not before: when the call above raises, `abort` has the pool to leave
        if self._dump_folder is not None:
            self._dump_folder.mkdir(parents=True, exist_ok=True)
            graph.debug_dump(str(self._dump_folder / f"graph_{self._num_graphs:04}.dot"))
            graph.instantiate()
            self._num_graphs += 1
        return graph

    def abort(self) -> None:
        """A capture that a refused call has spoilt cannot be ended by torch, whose allocators then hold its pool to be recorded
        into: the device's is told to stop, the host's never asks again when later captures have another pool."""
        graph, self._graph = self._graph, None
        try:
            if graph is not None:
                graph.capture_end()
        except RuntimeError as error:
            logger.debug("a failed capture ended with: %s", error)
            with contextlib.suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._pool)
            self._pool = torch.cuda.graph_pool_handle()

    def unowned(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if not storage.nbytes():
            return tensor
        memory = torch.as_tensor(_Memory(storage.data_ptr(), storage.nbytes()), device=tensor.device)
        return memory.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
