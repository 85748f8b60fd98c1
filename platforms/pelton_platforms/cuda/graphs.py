"""Capture through torch's CUDA graphs, all in one memory pool."""

from __future__ import annotations

import torch

from pelton.graphs.recorder import Graph, GraphRecorder


class CUDAGraphRecorder(GraphRecorder):
    """Captures on the current stream, which may not be the default one. Other threads may go on using the device."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._graph: torch.cuda.CUDAGraph | None = None

    def begin(self) -> None:
        assert self._graph is None, "a capture runs already"
        self._graph = torch.cuda.CUDAGraph()
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def end(self) -> Graph:
        assert self._graph is not None, "no capture runs"
        graph, self._graph = self._graph, None
        graph.capture_end()
        return graph
