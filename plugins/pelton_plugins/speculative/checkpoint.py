"""The checkpoint of a draft: its config, the layers that read it, and its weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from pelton.errors import ConfigError
from pelton.layers.decoder import Decoder
from pelton.layers.embedding import LMHead
from pelton.model.build import BuildConfig, HFConfig
from pelton.model.loading import LazyWeight, WeightLoader
from pelton.model.resolve import text_config
from pelton.model.weights import WeightMap
from pelton.quantization.plain import PlainWeights
from pelton.spec_decode.select import find_checkpoint

if TYPE_CHECKING:
    from torch import Tensor

    from pelton.config import EngineConfig
    from pelton.model.resolved import ResolvedModel
    from pelton.plugins import Plugins
    from pelton.spec_decode.drafter import DrafterContext

PREFIX = "draft."
"""Of a draft's layers with a cache, beside the model's."""
PICKLED = ("medusa_lm_head.pt", "pytorch_model.bin")
"""Files of older heads. Read as tensors and nothing else: torch refuses all that could run code."""


class HeadCheckpoint:
    """The checkpoint of layers that read the model's hidden states: it is no model by itself."""

    def __init__(self, context: DrafterContext) -> None:
        config, plugins = context.engine_config, context.plugins
        path, model_format = find_checkpoint(config, plugins)
        raw = model_format.read_config(path)
        self.path, self._plugins, self._engine_config = path, plugins, config
        self.hf = HFConfig(text_config(raw, {}))
        self._file = _pickled(path)
        weights_format = "" if self._file is not None else model_format.weights_format(path)
        self._info = msgspec.structs.replace(
            context.info, name=str(path), path=str(path), weights_format=weights_format,
            hf_config=text_config(raw, {}), raw_config=raw, pooling=None,
        )  # fmt: skip
        weights = WeightMap()
        weights.make_copier = context.build.weights.make_copier
        self.build: BuildConfig = replace(
            context.build, hf=self.hf, raw_hf=HFConfig(raw), ops=context.build.ops.fork(), weights=weights, cache_layers={},
            cacheless_layers={}, ropes={}, quantization=PlainWeights(), adapters=None,
        )  # fmt: skip

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor's shape, by its name."""
        return {name: tuple(weight.shape) for name, weight in self._weights()}

    def load(self) -> None:
        """Fill what the layers of `build` expect."""
        self.build.weights.load(self._weights())
        self.build.ops.weights_loaded()

    def _weights(self) -> Iterator[tuple[str, LazyWeight]]:
        if self._file is not None:
            return _tensors(self._file)
        return make_loader(self._engine_config, self._info, self.build, self._plugins).weights()


def make_loader(config: EngineConfig, info: ResolvedModel, build: BuildConfig, plugins: Plugins) -> WeightLoader:
    """The loader of the checkpoint's form, or of none where the settings want no real weights."""
    is_dummy = config.load.load_format == "dummy"
    entry = plugins.find(
        "pelton_model_loaders", "dummy" if is_dummy else info.weights_format, setting="speculative_config.model"
    )
    loader: WeightLoader = entry.resolve()(config, info)
    loader.parallel = build.parallel
    loader.expect(build.weights.expected())
    return loader


def join_caches(build: BuildConfig, context: DrafterContext) -> None:
    """Let a draft's layers share the block tables of the model's."""
    for name, layer in build.cache_layers.items():
        layer.layer_name = PREFIX + name
        if layer.shares is not None:
            layer.shares = PREFIX + layer.shares
        context.build.cache_layers[PREFIX + name] = layer


def head_model(context: DrafterContext) -> Any:
    """The model, which gives the hidden states that its head reads. Raises `ConfigError` where it has no such method."""
    model = context.model
    if not isinstance(model, Decoder) or not isinstance(getattr(model, "lm_head", None), LMHead):
        raise ConfigError(
            f"speculative_config.method is {context.config.method or 'unset'}, whose drafts come from the hidden states of the "
            f"model; {context.info.architecture} does not give them here. Use ngram or draft_model."
        )
    model.lm_head.keep_norm()
    return model


def _pickled(path: Path) -> Path | None:
    """The file of tensors of a folder that has no other."""
    if not path.is_dir() or any(path.glob("*.safetensors")):
        return None
    return next((path / name for name in PICKLED if (path / name).is_file()), None)


def _tensors(file: Path) -> Iterator[tuple[str, LazyWeight]]:
    try:
        found = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # what a file may hold is anybody's choice
        raise ConfigError(
            f"{file} is not read: {str(error).splitlines()[0]} Convert it to safetensors where you trust it."
        ) from error
    if not isinstance(found, dict) or not all(isinstance(value, torch.Tensor) for value in found.values()):
        raise ConfigError(f"{file} holds other things than tensors by their names. Convert it to safetensors.")
    for name, tensor in found.items():
        yield str(name), _TensorWeight(tensor)


class _TensorWeight(LazyWeight):
    """A tensor that is in memory."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape = tuple(tensor.shape)
        self._tensor = tensor

    def read(self, dim: int | None = None, start: int = 0, stop: int | None = None) -> Tensor:
        if dim is None:
            return self._tensor
        return self._tensor.narrow(dim, start, (self.shape[dim] if stop is None else stop) - start)
