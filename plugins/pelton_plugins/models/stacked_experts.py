"""Checkpoints whose experts are one tensor a matrix, for layers that read one for each expert."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING

import torch

from pelton.errors import ConfigError
from pelton.model.loading import LazyWeight

if TYPE_CHECKING:
    from torch import Tensor

_STACKED = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)(_scale)?")
_ONE = re.compile(r"(.*\.experts)\.\d+\.down_proj\.(\S+)")
_PLAIN = ("weight", "bias")  # tensors of a matrix that is not quantized


class _Part(LazyWeight):
    """Rows [first, last) of one expert's matrix in a tensor [E, rows, columns], or [E, columns, rows] where it is transposed."""

    def __init__(self, whole: LazyWeight, expert: int, first: int, last: int, is_transposed: bool) -> None:
        self._whole, self._expert, self._rows, self._is_transposed = whole, expert, (first, last), is_transposed
        self.shape = (last - first, whole.shape[1 if is_transposed else 2])

    def read(self, dim: int | None = None, start: int = 0, stop: int | None = None) -> Tensor:
        first, last = self._rows
        matrix = self._whole.read(0, self._expert, self._expert + 1)[0]
        rows = (matrix.t() if self._is_transposed else matrix)[first:last]
        return rows if dim is None else rows.narrow(dim, start, (self.shape[dim] if stop is None else stop) - start)


def one_for_each_expert(
    weights: Iterable[tuple[str, LazyWeight]],
    expected: Collection[str],
    *,
    is_transposed: bool = False,
    hidden_size: int | None = None,
) -> Iterator[tuple[str, LazyWeight]]:
    """Yield `weights`, with `...experts.gate_up_proj` [E, 2 I, H], gate first, and `...experts.down_proj` [E, H, I] taken apart into
    the names that the model expects, and so their scales for each row, `...gate_up_proj_scale` and `...down_proj_scale` [E, rows, 1] or
    [E, 1, rows]. A name that the model expects as it is stays so. is_transposed: the matrices are [E, H, 2 I] and [E, I, H].
    hidden_size: H, where they may be either, and their shape says which."""
    layers: dict[str, bool] = {}  # by name, whether experts are quantized by config.json
    for one in filter(None, map(_ONE.fullmatch, expected)):
        layers[one[1]] = layers.get(one[1], False) or one[2] not in _PLAIN
    for name, weight in weights:
        found = None if name in expected else _STACKED.fullmatch(name)
        if found is None or len(weight.shape) != 3 or found[1] not in layers:
            yield name, weight
            continue
        if layers[found[1]] and not found[3]:
            _check_quantized(found[1], weight)
        is_turned = weight.shape[1] == 1 if found[3] else is_transposed
        if hidden_size is not None and not found[3]:
            is_turned = weight.shape[1 if found[2] == "down_proj" else 2] != hidden_size
        num_rows = weight.shape[2 if is_turned else 1]
        parts = {"down_proj": (0, num_rows)}
        if found[2] == "gate_up_proj":
            parts = {"gate_proj": (0, num_rows // 2), "up_proj": (num_rows // 2, num_rows)}
        for expert in range(weight.shape[0]):
            for matrix, rows in parts.items():
                yield f"{found[1]}.{expert}.{matrix}.weight{found[3] or ''}", _Part(weight, expert, *rows, is_turned)


def _check_quantized(layer: str, weight: LazyWeight) -> None:
    dtype = weight.dtype or weight.read(0, 0, 1).dtype
    if dtype in (torch.float32, torch.bfloat16, torch.float16):
        raise ConfigError(
            f"The checkpoint has {layer} in {str(dtype).removeprefix('torch.')}, not quantized, and config.json's quantization_config says "
            'that they are. Add "re:.*experts.*" to the list there of what is left out (its ignore, exclude, modules_to_not_convert or '
            "llm_int8_skip_modules, whichever its quant_method has; --hf-overrides sets it too), or take the checkpoint that is not "
            "quantized: --quantization fp8 or q8_0 rounds it while it loads."
        )
