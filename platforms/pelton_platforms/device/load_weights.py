"""A model's weights, by the loader of its checkpoint's form, and a drafter's."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pelton.logging import Progress, phase
from pelton_platforms.device.memory import module_bytes

if TYPE_CHECKING:
    from pelton.model.loading import LazyWeight, WeightLoader
    from pelton_platforms.device.loaded import LoadedModel


def load_weights(loaded: LoadedModel, phase_s: dict[str, float]) -> int:
    """Load and finish them; returns the bytes that they take."""
    loader, expected = _make_loader(loaded), loaded.build.weights.expected()
    loader.expect(expected)
    item_bytes = loaded.build.dtype.itemsize
    total = sum(math.prod(shape) for shape in expected.values()) * item_bytes
    with phase("load weights", phase_s, total=total, unit="B") as progress:
        loaded.model.load_weights(_watched(loader.weights(), progress, item_bytes))
        loaded.build.ops.weights_loaded()
        if hasattr(loaded.model, "weights_loaded"):
            loaded.model.weights_loaded()
    num_bytes = module_bytes(loaded.model) + (0 if loaded.adapters is None else loaded.adapters.layers.num_bytes)
    if loaded.drafter is None:
        return num_bytes
    with phase("load draft weights", phase_s):
        loaded.drafter.load_weights()
    return num_bytes + module_bytes(loaded.drafter)


def _make_loader(loaded: LoadedModel) -> WeightLoader:
    named = loaded.config.load.load_format
    name = loaded.info.weights_format if named == "auto" else named
    entry = loaded.plugins.find("pelton_model_loaders", name, setting="load_format")
    loader: WeightLoader = entry.resolve()(loaded.config, loaded.info)
    loader.parallel = loaded.build.parallel
    return loader


def _watched(
    weights: Iterator[tuple[str, LazyWeight]], progress: Progress, item_bytes: int
) -> Iterator[tuple[str, LazyWeight]]:
    for name, weight in weights:
        yield name, weight
        progress.advance(math.prod(weight.shape) * item_bytes)
