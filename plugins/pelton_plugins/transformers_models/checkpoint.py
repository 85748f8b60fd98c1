"""Names and forms of a checkpoint's tensors as transformers' modules have them: experts in one tensor, renamed heads."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from pelton.errors import ConfigError
from pelton.model.loading import LazyWeight

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

_OF_EXPERTS = re.compile(r"(.*\bexperts)\.(.+)")


class _InMemory(LazyWeight):
    """A tensor that conversions made."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self.shape = tuple(tensor.shape)

    def read(self, dim: int | None = None, start: int = 0, stop: int | None = None) -> Tensor:
        if dim is None:
            return self._tensor
        return self._tensor.narrow(dim, start, (self.shape[dim] if stop is None else stop) - start)


class _Shapes:
    """In a model's place, whose parameters are asked for their shapes and dtypes alone."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._parameters = {
            name: (one.shape, one.dtype) for name, one in model.named_parameters(remove_duplicate=False)
        }

    def get_parameter(self, name: str) -> Tensor:
        shape, dtype = self._parameters[name]
        return torch.empty(shape, dtype=dtype, device="meta")


class Conversions:
    """transformers' rules for one model."""

    def __init__(self, model: PreTrainedModel, method: str | None = None) -> None:
        """method: the quant_method of a quantized checkpoint."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        rules = get_model_conversion_mapping(model)
        self._renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        self._converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        self._prefix, self._shapes, self._config = model.base_model_prefix, _Shapes(model), model.config
        self._method = method
        self._unread = [re.compile(pattern) for pattern in _unread(model)]

    def apply(
        self, weights: Iterable[tuple[str, LazyWeight]], expected: Mapping[str, Any]
    ) -> Iterator[tuple[str, LazyWeight]]:
        """Hand on tensors under the modules' names. Those that are made of several are made when all have been seen.

        Raises `ConfigError` where experts are quantized."""
        from transformers.core_model_loading import rename_source_key

        by_pattern = {pattern: one for one in self._converters for pattern in one.source_patterns}
        made: dict[str, Any] = {}
        sources: dict[str, list[tuple[str, str, LazyWeight]]] = {}
        for name, weight in weights:
            if name in expected:
                yield name, weight
                continue
            if any(pattern.search(name) for pattern in self._unread):
                continue
            renamed, pattern = rename_source_key(
                name, self._renamings, self._converters, self._prefix, dict.fromkeys(expected, True)
            )
            if pattern is None:
                if self._method is not None and renamed not in expected and (found := _OF_EXPERTS.fullmatch(renamed)):
                    raise _quantized_experts(found[1], name, self._method)
                yield renamed, weight
            else:
                made.setdefault(renamed, by_pattern[pattern])
                sources.setdefault(renamed, []).append((name, pattern, _InMemory(weight.read().clone())))
        for first_name, rule in made.items():
            converter = copy.deepcopy(rule)
            for name, pattern, weight in sorted(sources.pop(first_name), key=lambda one: _natural(one[0])):
                converter.add_tensor(first_name, name, pattern, weight.read)
            made_of = converter.convert(first_name, model=self._shapes, config=self._config)
            for target, tensor in made_of.items():
                yield target, _InMemory(tensor[0] if isinstance(tensor, list) else tensor)


def _quantized_experts(layer: str, name: str, method: str) -> ConfigError:
    return ConfigError(
        f"config.json's quantization_config says {method!r}, and the checkpoint has {name}: {layer} are quantized. On transformers' "
        "modules experts are kept in the model's dtype alone. If Pelton has the model itself (pelton plugins lists them), leave "
        "model_impl unset; else take the checkpoint that is not quantized: --quantization fp8 or q8_0 rounds its matrices but for the "
        "experts."
    )


def _unread(model: PreTrainedModel) -> Iterator[str]:
    """Yield what is in the names of tensors that transformers leaves in a checkpoint: of layers that predict further tokens, and others."""
    yield from model._keys_to_ignore_on_load_unexpected or ()
    text = model.config.get_text_config(decoder=True)
    for index in range(getattr(text, "num_nextn_predict_layers", None) or 0):
        yield rf"(^|\.)layers\.{text.num_hidden_layers + index}\."


def _natural(name: str) -> list[tuple[int, int | str]]:
    """Parts of a name, numbers by their size."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in name.split(".")]
