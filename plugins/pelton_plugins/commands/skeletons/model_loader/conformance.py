"""Conformance of this package's weight loader."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from pelton.testing.model_loader import WeightLoaderConformance
from torch import Tensor

from pelton_skeleton.loader import SkeletonLoader


class TestSkeletonLoader(WeightLoaderConformance):
    loader_class = SkeletonLoader

    def write(self, folder: Path, weights: dict[str, Tensor]) -> Path:
        np.savez(folder / "weights.npz", **{name: tensor.numpy() for name, tensor in weights.items()})
        return folder
