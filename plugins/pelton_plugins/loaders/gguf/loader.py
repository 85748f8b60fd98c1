"""Weights of a .gguf file, dequantized row by row as the model reads them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from pelton.config import EngineConfig
from pelton.errors import ConfigError
from pelton.model.loading import LazyWeight, WeightLoader
from pelton.model.resolved import ResolvedModel
from pelton_plugins.loaders.gguf.dequantize import dequantize
from pelton_plugins.loaders.gguf.file import GGUFFile, TensorInfo
from pelton_plugins.loaders.gguf.names import expert_name, hf_name, permuted_part

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

PLAIN_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class GGUFLoader(WeightLoader):
    """F32, F16 and BF16 are read as they are, quantized tensors as float32."""

    def __init__(self, config: EngineConfig, model: ResolvedModel) -> None:
        self._file = GGUFFile(model.path)
        self._heads = {
            "attn_q": int(model.hf_config["num_attention_heads"]),
            "attn_k": int(model.hf_config["num_key_value_heads"]),
        }

    def weights(self) -> Iterator[tuple[str, LazyWeight]]:
        for info in sorted(self._file.tensors.values(), key=lambda info: info.start):
            part = permuted_part(self._file.architecture, info.name)
            for name, matrix in named(info):
                yield name, GGUFWeight(self._file, matrix, num_heads=self._heads[part] if part else None)
            self._file.forget_pages(info)

    @property
    def total_bytes(self) -> int:
        return sum(info.num_bytes for info in self._file.tensors.values())


def named(info: TensorInfo) -> list[tuple[str, TensorInfo]]:
    """The weights in a tensor of the file by their Hugging Face names: one, none, or a matrix of each expert."""
    if expert_name(info.name, 0) is None:
        name = hf_name(info.name)
        return [] if name is None else [(name, info)]
    count, num_bytes = info.shape[0], info.num_bytes // info.shape[0]
    parts = [
        replace(info, shape=info.shape[1:], start=info.start + index * num_bytes, num_bytes=num_bytes)
        for index in range(count)
    ]
    return [(str(expert_name(info.name, index)), part) for index, part in enumerate(parts)]


class GGUFWeight(LazyWeight):
    """One tensor; with `num_heads`, the rows of each head are put back into Hugging Face's order."""

    def __init__(self, file: GGUFFile, info: TensorInfo, *, num_heads: int | None = None) -> None:
        self.shape = info.shape
        self.quant_type = info.quant_type
        self._file = file
        self._info = info
        self._rows = None if num_heads is None else _row_order(file, info, num_heads)

    def read(self, dim: int | None = None, start: int = 0, stop: int | None = None) -> Tensor:
        if dim in (None, 0):
            return self._read_rows(slice(start, stop) if dim == 0 else slice(None))
        return self._read_rows(slice(None)).narrow(dim, start, (self.shape[dim] if stop is None else stop) - start)

    def blocks(self, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of a matrix as they are stored, [stop - start, bytes] uint8: a copy."""
        raw = np.frombuffer(self._file.data, dtype=np.uint8, count=self._info.num_bytes, offset=self._info.start)
        rows = raw.reshape(self.shape[0], -1)
        return torch.from_numpy(np.array(rows[start:stop] if self._rows is None else rows[self._rows[start:stop]]))

    def _read_rows(self, wanted: slice) -> Tensor:
        quant_type = self._info.quant_type
        raw = np.frombuffer(self._file.data, dtype=np.uint8, count=self._info.num_bytes, offset=self._info.start)
        if len(self.shape) == 1:
            values = (
                _plain(raw, self._info) if quant_type.name in PLAIN_DTYPES else _quantized(raw[None], self._info)[0]
            )
            return values[wanted] if self._rows is None else values[torch.from_numpy(self._rows[wanted])]
        num_rows = self.shape[0]
        rows = raw.reshape(num_rows, -1)
        rows = rows[wanted] if self._rows is None else rows[self._rows[wanted]]
        values = _plain(rows, self._info) if quant_type.name in PLAIN_DTYPES else _quantized(rows, self._info)
        return values.reshape(rows.shape[0], *self.shape[1:])


def _row_order(file: GGUFFile, info: TensorInfo, num_heads: int) -> NDArray[np.int64]:
    """Where in the file each Hugging Face row lies: rotation partners j and j + half are neighbours there."""
    num_rows = info.shape[0]
    if num_rows % (2 * num_heads):
        raise ConfigError(f"{file.path}: {info.name} has {num_rows} rows, which {num_heads} heads cannot share evenly.")
    rows = np.arange(num_rows, dtype=np.int64).reshape(num_heads, num_rows // num_heads // 2, 2)
    return np.ascontiguousarray(rows.swapaxes(1, 2)).reshape(-1)


def _plain(raw: NDArray[np.uint8], info: TensorInfo) -> Tensor:
    # Copied: torch wants writable memory, and the file is mapped read-only.
    return torch.from_numpy(np.array(raw, order="C").reshape(-1)).view(PLAIN_DTYPES[info.quant_type.name])


def _quantized(rows: NDArray[np.uint8], info: TensorInfo) -> Tensor:
    return torch.from_numpy(dequantize(rows, info.quant_type))
