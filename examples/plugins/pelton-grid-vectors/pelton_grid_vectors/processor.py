"""From a grid of numbers to prompts, and from their vectors to a grid of vectors."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from pelton import PoolingParams, PoolingRequestOutput
from pelton.engine.input_processor import Prompt
from pelton.errors import RequestError
from pelton.outputs import PoolingOutput
from pelton.pooling.io_processor import IOProcessor, IOProcessorContext

MAX_CELLS = 65_536
FIRST_TOKEN = 4
"""Ids below it are special in most vocabularies."""


class GridRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Request as a user sends it."""

    values: list[list[float]]
    """Rows of equal length; numbers from 0 to 1."""
    patch: int = 4
    """Cells of a patch's side."""


class GridAnswer(msgspec.Struct, kw_only=True):
    """Answer that a user gets."""

    shape: tuple[int, int, int]
    """Rows and columns of patches, numbers of a vector."""
    vectors: str
    """float32, little-endian, in base64."""

    def array(self) -> npt.NDArray[np.float32]:
        return np.frombuffer(base64.b64decode(self.vectors), dtype="<f4").reshape(self.shape)


@dataclass(frozen=True, slots=True)
class Grid:
    """A checked request."""

    values: npt.NDArray[np.float64]
    patch: int


class GridProcessor(IOProcessor[Grid, GridAnswer]):
    """A prompt for each patch, row by row: a token for each of its cells, by the cell's level."""

    def __init__(self, context: IOProcessorContext) -> None:
        super().__init__(context)
        self._num_levels = context.model.vocab_size - FIRST_TOKEN
        self._max_tokens = context.model.max_model_len
        self._shapes: dict[str | None, tuple[int, int]] = {}  # of requests under way

    def parse_data(self, data: object) -> Grid:
        try:
            request = data if isinstance(data, GridRequest) else msgspec.convert(data, GridRequest)
        except msgspec.ValidationError as error:
            raise RequestError(f"data is not a grid: {error}", param="data") from None
        widths = {len(row) for row in request.values}
        if len(widths) != 1 or widths == {0}:
            raise RequestError("data.values needs rows of one length, with at least one number", param="data.values")
        values = np.asarray(request.values, dtype=np.float64)
        if values.size > MAX_CELLS:
            raise RequestError(f"data.values has {values.size} numbers; at most {MAX_CELLS}", param="data.values")
        if not ((values >= 0) & (values <= 1)).all():
            raise RequestError("data.values must be numbers from 0 to 1", param="data.values")
        side = request.patch
        if not 1 <= side <= min(values.shape) or values.shape[0] % side or values.shape[1] % side:
            raise RequestError(
                f"data.patch must divide both sides of the grid, {values.shape[0]} and {values.shape[1]}",
                param="data.patch", value=side,
            )  # fmt: skip
        if side * side > self._max_tokens:
            raise RequestError(f"data.patch may have at most {self._max_tokens} cells", param="data.patch", value=side)
        return Grid(values, side)

    def merge_pooling_params(self, params: PoolingParams | None = None) -> PoolingParams:
        """Vectors as they are, unless the request says otherwise."""
        return params or PoolingParams(task="embed", use_activation=False)

    def pre_process(self, prompt: Grid, request_id: str | None = None, **kwargs: Any) -> Sequence[Prompt]:
        levels = FIRST_TOKEN + np.rint(prompt.values * (self._num_levels - 1)).astype(np.int64)
        rows, columns = _counts(prompt.values.shape, prompt.patch)
        patches = levels.reshape(rows, prompt.patch, columns, prompt.patch).swapaxes(1, 2)
        self._shapes[request_id] = rows, columns
        return list(patches.reshape(rows * columns, -1).tolist())

    def post_process(
        self, model_output: Sequence[PoolingRequestOutput[PoolingOutput]], request_id: str | None = None, **kwargs: Any
    ) -> GridAnswer:
        vectors = np.stack([output.outputs.data for output in model_output])
        rows, columns = self._shapes[request_id]
        return GridAnswer(shape=(rows, columns, vectors.shape[1]), vectors=base64.b64encode(vectors.tobytes()).decode())

    def discard(self, request_id: str | None) -> None:
        self._shapes.pop(request_id, None)


def _counts(shape: tuple[int, ...], patch: int) -> tuple[int, int]:
    return shape[0] // patch, shape[1] // patch
