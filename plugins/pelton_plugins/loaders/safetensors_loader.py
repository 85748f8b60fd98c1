"""Weights of *.safetensors files, one or sharded: each tensor read once, in file order.

Only the slices that this rank keeps are read. What goes into place as it is, is read there by several threads; the rest is given
as views of the memory-mapped file. Pages of a mapped file count as this process's memory until the mapping goes, so it is made
anew every `MAPPED_BYTES`: without that, a model in one file takes twice its size while it loads.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from pelton.config import EngineConfig
from pelton.errors import ConfigError
from pelton.model.formats import read_json
from pelton.model.loading import LazyWeight, WeightLoader
from pelton.model.resolved import ResolvedModel
from pelton_plugins.loaders.parallel_reader import FileSource, ParallelReader
from pelton_plugins.loaders.safetensors_header import DTYPES, Header, read_header

if TYPE_CHECKING:
    from torch import Tensor

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAPPED_BYTES = 32 * 2**20


class SafetensorsLoader(WeightLoader):
    """Files are found, and each is opened once, when this is made: a missing shard is an error before anything is loaded."""

    def __init__(self, config: EngineConfig, model: ResolvedModel) -> None:
        self._shards = find_shards(Path(model.path))
        dense = model.pooling.dense if model.pooling is not None else []
        self._modules = {Path(model.path) / one.path / SINGLE: f"{one.path}." for one in dense}
        for file, names in self._shards.items():
            with _open(file) as shard:
                missing = [] if names is None else sorted(names - set(shard.keys()))
            if missing:
                raise ConfigError(
                    f"{file} lacks {missing[0]!r} and {len(missing) - 1} other tensors that {INDEX} puts there. "
                    "Download it again."
                )

    def weights(self) -> Iterator[tuple[str, LazyWeight]]:
        reader = ParallelReader()
        with reader.running():
            for file, names in self._shards.items():
                yield from mapped_weights(file, names, reader)
        for file, prefix in self._modules.items():
            module = _open(file)
            for name in module.offset_keys():
                yield prefix + name, SafetensorsWeight(file, name, module.get_slice(name))

    @property
    def total_bytes(self) -> int:
        return sum(file.stat().st_size for file in self._shards)


def find_shards(folder: Path) -> dict[Path, set[str] | None]:
    """File to the tensors that the index puts there (None: all of them), in order of name."""
    index = folder / INDEX
    if index.is_file():
        return _indexed_shards(index)
    if (folder / SINGLE).is_file():
        return {folder / SINGLE: None}
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{folder} has no *.safetensors file; download the weights, or use --load-format dummy.")
    if len(files) > 1:
        raise ConfigError(
            f"{folder} has {len(files)} *.safetensors files ({files[0].name}, ...), but no {INDEX} that says what they "
            "hold. Download it too."
        )
    return {files[0]: None}


def _indexed_shards(index: Path) -> dict[Path, set[str] | None]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError(f"{index} has no weight_map; download it again.")
    found: dict[str, set[str]] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise ConfigError(
                f"{index} puts {name!r} into {file!r}; expected the name of a .safetensors file beside it."
            )
        found.setdefault(file, set()).add(name)
    missing = [file for file in sorted(found) if not (index.parent / file).is_file()]
    if missing:
        raise ConfigError(
            f"{index.parent / missing[0]} is missing ({len(missing)} of {len(found)} shards are). Download the model again."
        )
    return {index.parent / file: found[file] for file in sorted(found)}


def mapped_weights(
    file: Path, names: set[str] | None, reader: ParallelReader
) -> Iterator[tuple[str, SafetensorsWeight]]:
    """The tensors of one file in its order, those of `names` where it is given; `reader` fills what takes them as they are."""
    shard, num_mapped, ranges = _open(file), 0, FileRanges(file, reader)
    for name in shard.offset_keys():
        if names is not None and name not in names:
            continue
        weight = SafetensorsWeight(file, name, shard.get_slice(name), ranges)
        yield name, weight
        num_mapped += 0 if weight.is_filled else weight.num_bytes
        if num_mapped > MAPPED_BYTES:
            del weight
            shard, num_mapped = _open(file), 0


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{file} is not a valid safetensors file: {error}. Download it again.") from error


class FileRanges:
    """Fills tensors from one file by their places in it."""

    def __init__(self, file: Path, reader: ParallelReader) -> None:
        self._source, self._reader = FileSource(file), reader
        self._header = header_of(self._source)

    def finish(self) -> None:
        self._reader.finish()

    def fill_later(self, name: str, target: Tensor, dim: int | None, start: int, stop: int | None) -> bool:
        place = self._header.tensors.get(name)
        return place is not None and self._reader.fill(self._source, place, target, dim, start, stop)


def header_of(source: FileSource) -> Header:
    """Read a file's header."""

    def read(offset: int, size: int) -> bytes:
        found = bytearray(size)
        source.read_into(offset, memoryview(found))
        return bytes(found)

    return read_header(source.name, source.size, read)


class SafetensorsWeight(LazyWeight):
    """A view of the mapped file: keep neither it nor what `read` gives, or the mapping stays."""

    def __init__(self, file: Path, name: str, view: Any, ranges: FileRanges | None = None) -> None:
        self.shape, self.dtype = tuple(view.get_shape()), DTYPES.get(view.get_dtype())
        self.is_filled = False
        """What was asked for went into place: the mapping was not touched."""
        self._file = file
        self._name = name
        self._view = view
        self._ranges = ranges

    def fill(self, target: Tensor, dim: int | None = None, start: int = 0, stop: int | None = None) -> bool:
        if self._ranges is not None and self.fill_later(target, dim, start, stop):
            self._ranges.finish()
        return self.is_filled

    def fill_later(self, target: Tensor, dim: int | None = None, start: int = 0, stop: int | None = None) -> bool:
        self.is_filled = self._ranges is not None and self._ranges.fill_later(self._name, target, dim, start, stop)
        return self.is_filled

    @property
    def num_bytes(self) -> int:
        bits = re.search(r"\d+", self._view.get_dtype())  # "BF16", "F8_E4M3"; BOOL takes a byte
        return math.prod(self.shape) * (int(bits[0]) if bits else 8) // 8

    def read(self, dim: int | None = None, start: int = 0, stop: int | None = None) -> Tensor:
        index: Any = ()
        if dim is not None:
            index = (*([slice(None)] * dim), slice(start, self.shape[dim] if stop is None else stop))
        elif self.shape:
            index = slice(None)
        try:
            tensor: Tensor = self._view[index]
        except SafetensorError as error:
            raise ConfigError(
                f"{self._file}: tensor {self._name!r} cannot be read: {error}. Download it again."
            ) from error
        return tensor
