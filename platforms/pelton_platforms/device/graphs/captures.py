"""Captured steps by key, and the pieces of one step around its attention calls."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from torch import Tensor
from torch.utils._pytree import tree_map_only

from pelton import moved
from pelton.config.compilation import CUDAGraphMode
from pelton.graphs.recorder import Graph, GraphRecorder
from pelton.logging import get_logger

if TYPE_CHECKING:
    from pelton.attention.interface import BoundAttention
    from pelton.attention.metadata import ForwardBatch
    from pelton.layers.attention import AttentionLayer

OLD_NAMES = {"PieceGraphs": f"{__name__}.PiecewiseGraphs", "run_apart": f"{__name__}.run_split_at_attention"}
if not TYPE_CHECKING:
    __getattr__ = moved.names_of(__name__, OLD_NAMES)

T = TypeVar("T")

logger = get_logger(__name__)


class _Refusals:
    """Keys that could not be captured. Their steps run eagerly from then on: slower, and right all the same."""

    def __init__(self) -> None:
        self._keys: set[Hashable] = set()

    def __contains__(self, key: Hashable) -> bool:
        return key in self._keys

    def attempt(self, key: Hashable, capture: Callable[[], None]) -> None:
        """The step itself has run: a capture that fails must not fail it."""
        if key in self._keys:
            return
        try:
            capture()
        except Exception:
            self._keys.add(key)
            logger.exception("Capturing the step %s failed; steps of its kind run without a graph.", key)


def _unowned(recorder: GraphRecorder, outputs: Any) -> Any:
    """Return weak references to a captured call's results, read before the next replay: no graph keeps memory of its own for it."""
    return tree_map_only(Tensor, recorder.unowned, outputs)


@dataclass(slots=True)
class _Captured(Generic[T]):
    graph: Graph
    outputs: T


class FullGraphs:
    """Whole steps. Another mode: a plain call. An unknown key: a plain call, which compiles and loads all it needs, then the
    capture of another; a known key: replay."""

    def __init__(self, recorder: GraphRecorder) -> None:
        self._recorder = recorder
        self._captured: dict[Hashable, _Captured[Any]] = {}
        self._refusals = _Refusals()

    def __len__(self) -> int:
        return len(self._captured)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._captured

    def is_refused(self, key: Hashable) -> bool:
        """True where the capture has failed: `run` calls what it is given."""
        return key in self._refusals

    def discard(self, is_stale: Callable[[Any], bool]) -> None:
        """Free the graphs whose keys are stale. None of them may still be running."""
        self._captured = {key: captured for key, captured in self._captured.items() if not is_stale(key)}

    def run(self, mode: CUDAGraphMode, key: Hashable, call: Callable[[], T]) -> T:
        """Return what `call` returns: tensors that a replay fills again, and that the next replay of any graph may overwrite. `call`
        reads its inputs from fixed addresses."""
        if mode is not CUDAGraphMode.FULL:
            return call()
        captured = self._captured.get(key)
        if captured is None:
            if self._recorder.runs_calls:
                return self._run_recorded(key, call)
            outputs = call()
            self._refusals.attempt(key, lambda: self._capture(key, call))
            return outputs
        captured.graph.replay()
        return captured.outputs  # type: ignore[no-any-return]

    def _run_recorded(self, key: Hashable, call: Callable[[], T]) -> T:
        """Record while running; a step that cannot be recorded has run all the same."""
        if key in self._refusals:
            return call()
        self._recorder.begin()
        try:
            outputs = call()
        except BaseException:
            self._recorder.abort()
            raise

        def capture() -> None:
            self._captured[key] = _Captured(self._recorder.end(), outputs)

        self._refusals.attempt(key, capture)
        return outputs

    def _capture(self, key: Hashable, call: Callable[[], Any]) -> None:
        """Record without running."""
        try:
            self._recorder.begin()
            outputs = call()
            graph = self._recorder.end()
        except BaseException:
            self._recorder.abort()
            raise
        self._captured[key] = _Captured(graph, _unowned(self._recorder, outputs))


class _AttentionCall(NamedTuple):
    """A layer's attention on tensors that stay where they are."""

    attend: BoundAttention
    query: Tensor
    metadata_index: int
    output: Tensor


@dataclass(slots=True)
class _Pieces:
    graphs: list[Graph] = field(default_factory=list)
    calls: list[_AttentionCall] = field(default_factory=list)  # between the pieces
    outputs: Any = None


class PiecewiseGraphs:
    """Steps whose attention runs between captured pieces, with the metadata of the step."""

    def __init__(self, recorder: GraphRecorder) -> None:
        self._recorder = recorder
        self._captured: dict[Hashable, _Pieces] = {}
        self._refusals = _Refusals()

    def __len__(self) -> int:
        return len(self._captured)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._captured

    def run(self, mode: CUDAGraphMode, key: Hashable, call: Callable[[ForwardBatch], T], batch: ForwardBatch) -> T:
        """Return what `call(batch)` returns. Ids and positions of `batch` lie at fixed addresses; its attention metadata is this step's."""
        if mode is not CUDAGraphMode.PIECEWISE or key in self._refusals:
            return call(batch)
        pieces = self._captured.get(key)
        if pieces is None:
            outputs = run_split_at_attention(call, batch)
            self._refusals.attempt(key, lambda: self._capture(key, call, batch))
            return outputs
        for graph, (attend, query, index, output) in zip(pieces.graphs, pieces.calls, strict=False):
            graph.replay()
            attend(query, batch.attention[index], output)
        pieces.graphs[-1].replay()
        return pieces.outputs  # type: ignore[no-any-return]

    def _capture(self, key: Hashable, call: Callable[[ForwardBatch], Any], batch: ForwardBatch) -> None:
        """Record without running; attention is left out."""
        pieces = _Pieces()
        try:
            self._recorder.begin()
            outputs = call(replace(batch, cut=partial(self._cut, pieces)))
            pieces.graphs.append(self._recorder.end())
            pieces.outputs = _unowned(self._recorder, outputs)
        except BaseException:
            self._recorder.abort()
            raise
        self._captured[key] = pieces

    def _cut(self, pieces: _Pieces, layer: AttentionLayer, query: Tensor, output: Tensor) -> None:
        """End one piece and start the next; what is captured before and after is unordered otherwise."""
        recorder = self._recorder
        pieces.graphs.append(recorder.end())
        # Read before the next piece runs: every layer's, of every size, may lie in the same memory.
        query, output = recorder.unowned(query), recorder.unowned(output)
        pieces.calls.append(_AttentionCall(layer.attend, query, layer.metadata_index, output))
        recorder.begin()


def run_split_at_attention(call: Callable[[ForwardBatch], T], batch: ForwardBatch) -> T:
    """`call(batch)` with the kernels of a step in pieces, and no graph: each layer's op that writes, then its attention."""
    return call(replace(batch, cut=partial(_attend, batch)))


def _attend(batch: ForwardBatch, layer: AttentionLayer, query: Tensor, output: Tensor) -> None:
    layer.attend(query, batch.attention[layer.metadata_index], output)
