"""Weights of `weights.npz`: `--load-format skeleton`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pelton.config import EngineConfig
from pelton.errors import ConfigError
from pelton.model.loading import LazyWeight, WeightLoader
from pelton.model.resolved import ResolvedModel
from torch import Tensor


class SkeletonWeight(LazyWeight):
    """One array of the file."""

    def __init__(self, array: Any) -> None:
        self._array = array
        self.shape = tuple(array.shape)

    def read(self, dim: int | None = None, start: int = 0, stop: int | None = None) -> Tensor:
        tensor = torch.from_numpy(self._array)
        return tensor if dim is None else tensor.narrow(dim, start, (self.shape[dim] if stop is None else stop) - start)


class SkeletonLoader(WeightLoader):
    """Made once per worker; `model.path` is what a model source found."""

    def __init__(self, config: EngineConfig, model: ResolvedModel) -> None:
        self._file = Path(model.path) / "weights.npz"

    def weights(self) -> Iterator[tuple[str, LazyWeight]]:
        try:
            with np.load(self._file, allow_pickle=False) as arrays:
                for name in arrays.files:
                    yield name, SkeletonWeight(arrays[name])
        except (OSError, ValueError) as error:
            raise ConfigError(f"{self._file} cannot be read: {error}. Save it with numpy.savez.") from error

    @property
    def total_bytes(self) -> int:
        return self._file.stat().st_size if self._file.is_file() else 0
