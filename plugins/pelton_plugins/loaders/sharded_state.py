"""One file a rank: what each rank reads of a checkpoint, written once, and read whole at every start afterwards.

    pelton save-sharded-state MODEL --output DIR --tensor-parallel-size 2
    pelton serve DIR --tensor-parallel-size 2          # finds the form by its files; --load-format sharded_state says it

While the model loads for `save_sharded_state`, the slices that layers ask for are noted; then these are written as they lie in the
checkpoint, under its names. So every model and quantization method has the form, and what a rank reads later is what it read then.
Files are named as vLLM's, `model-rank-0-part-0.safetensors`, and hold other tensors: its own names for a rank's parameters.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from safetensors.torch import save_file

from pelton.config import EngineConfig
from pelton.errors import ConfigError
from pelton.model.loading import LazyWeight, WeightLoader
from pelton.model.resolved import ResolvedModel
from pelton_plugins.loaders.extra_config import read_extra_config
from pelton_plugins.loaders.parallel_reader import FileSource, ParallelReader
from pelton_plugins.loaders.safetensors_header import needs_mapping
from pelton_plugins.loaders.safetensors_loader import SafetensorsLoader, header_of, mapped_weights

if TYPE_CHECKING:
    from torch import Tensor

    from pelton.parallel.context import ParallelContext

PATTERN = "model-rank-{rank}-part-{part}.safetensors"
MAX_PART_BYTES = 5 * 10**9
METADATA = "pelton_sharded_state"
Span = tuple[int | None, int, int]  # dim, start, stop; a dim of None: the whole tensor


class ShardedStateSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`model_loader_extra_config` of `sharded_state` and `save_sharded_state`."""

    pattern: str = PATTERN
    """Names of the files, with {rank} and {part}."""
    output: str = ""
    """Folder to write to, of `save_sharded_state`."""
    max_size: int = MAX_PART_BYTES
    """Bytes of one file, of `save_sharded_state`; a tensor is never divided."""

    def __post_init__(self) -> None:
        if "{rank}" not in self.pattern or "{part}" not in self.pattern or "/" in self.pattern:
            raise ValueError(f"pattern is {self.pattern!r}, it needs {{rank}} and {{part}}, and no folder")
        if not self.pattern.endswith(".safetensors"):
            raise ValueError(f"pattern is {self.pattern!r}, it ends in .safetensors")
        if self.max_size < 1:
            raise ValueError(f"max_size is {self.max_size}, use at least 1")

    def name(self, rank: int, part: int) -> str:
        return self.pattern.replace("{rank}", str(rank)).replace("{part}", str(part))


@dataclass(frozen=True, slots=True)
class Place:
    """A rank among those of one model."""

    rank: int
    world: tuple[int, int]  # stages, and ranks of each

    @classmethod
    def of(cls, parallel: ParallelContext) -> Place:
        stages = parallel.stages
        stage, num_stages = (0, 1) if stages is None else (stages.rank, stages.size)
        return cls(stage * parallel.size + parallel.rank, (num_stages, parallel.size))

    def __str__(self) -> str:
        stages, size = self.world
        return f"tensor_parallel_size {size}" + (f" and pipeline_parallel_size {stages}" if stages > 1 else "")


class SavingLoader(WeightLoader):
    """Loads a folder's *.safetensors, and writes this rank's file when they are in place."""

    def __init__(self, config: EngineConfig, model: ResolvedModel) -> None:
        example = '{"output": "/models/llama-2-ranks"}'
        self._settings = read_extra_config(config, ShardedStateSettings, example)
        if not self._settings.output:
            raise ConfigError(
                f"load_format 'save_sharded_state' needs model_loader_extra_config with an output folder, such as {example}."
            )
        self._loader = SafetensorsLoader(config, model)

    def weights(self) -> Iterator[tuple[str, LazyWeight]]:
        spans: dict[str, set[Span]] = {}
        for name, weight in self._loader.weights():
            spans[name] = set()
            yield name, NotedWeight(weight, spans[name])
        self._save({name: joined(found) for name, found in spans.items() if found})

    def _save(self, spans: dict[str, list[Span]]) -> None:
        assert self.parallel is not None, "set by the worker"
        files = _Files(Path(self._settings.output), self._settings, Place.of(self.parallel))
        for name, weight in self._loader.weights():
            for dim, start, stop in spans.get(name, []):
                part = weight.read() if dim is None else weight.read(dim, start, stop)
                files.add(name, weight.shape, (dim, start, stop), part)
        files.finish()

    @property
    def total_bytes(self) -> int:
        return self._loader.total_bytes


class NotedWeight(LazyWeight):
    """A weight that notes which slices are asked for."""

    def __init__(self, weight: LazyWeight, spans: set[Span]) -> None:
        self.shape, self.dtype = weight.shape, weight.dtype
        self._weight, self._spans = weight, spans

    def _note(self, dim: int | None, start: int, stop: int | None) -> None:
        if dim is None or (start == 0 and stop in (None, self.shape[dim])):
            self._spans.add((None, 0, 0))
        else:
            self._spans.add((dim, start, self.shape[dim] if stop is None else stop))

    def read(self, dim: int | None = None, start: int = 0, stop: int | None = None) -> Tensor:
        self._note(dim, start, stop)
        return self._weight.read(dim, start, stop)

    def fill(self, target: Tensor, dim: int | None = None, start: int = 0, stop: int | None = None) -> bool:
        self._note(dim, start, stop)
        return self._weight.fill(target, dim, start, stop)

    def fill_later(self, target: Tensor, dim: int | None = None, start: int = 0, stop: int | None = None) -> bool:
        self._note(dim, start, stop)
        return self._weight.fill_later(target, dim, start, stop)


def joined(spans: set[Span]) -> list[Span]:
    """The least slices that hold all of `spans`, in order; the whole tensor where they are along several dims."""
    dims = {dim for dim, _, _ in spans}
    if len(dims) > 1 or None in dims:
        return [(None, 0, 0)]
    found: list[Span] = []
    for dim, start, stop in sorted(spans, key=lambda span: span[1:]):
        if found and start <= found[-1][2]:
            found[-1] = (dim, found[-1][1], max(stop, found[-1][2]))
        else:
            found.append((dim, start, stop))
    return found


class _Files:
    """A rank's files, each written when it is full."""

    def __init__(self, folder: Path, settings: ShardedStateSettings, place: Place) -> None:
        self._folder, self._settings, self._place = folder, settings, place
        self._tensors: dict[str, Tensor] = {}
        self._slices: dict[str, Any] = {}
        self._num_bytes = self._num_files = 0

    def add(self, name: str, shape: tuple[int, ...], span: Span, part: Tensor) -> None:
        num_bytes = part.numel() * part.element_size()
        if self._tensors and self._num_bytes + num_bytes > self._settings.max_size:
            self._write()
        dim, start, stop = span
        key = name if dim is None else f"{name}[{dim},{start}:{stop}]"
        if dim is not None:
            self._slices[key] = {"name": name, "shape": list(shape), "dim": dim, "start": start}
        self._tensors[key] = part.clone().contiguous()  # a view of the checkpoint's mapping until here
        self._num_bytes += num_bytes

    def finish(self) -> None:
        if self._tensors or not self._num_files:
            self._write()

    def _write(self) -> None:
        said = {"slices": self._slices, "world": list(self._place.world)}
        file = self._folder / self._settings.name(self._place.rank, self._num_files)
        partial = file.with_suffix(".partial")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            save_file(self._tensors, partial, {METADATA: json.dumps(said)})
            os.replace(partial, file)
        except OSError as error:
            raise ConfigError(f"{file} cannot be written: {error.strerror}.") from error
        self._tensors, self._slices, self._num_bytes = {}, {}, 0
        self._num_files += 1


class ShardedStateLoader(WeightLoader):
    """Reads this rank's files alone."""

    def __init__(self, config: EngineConfig, model: ResolvedModel) -> None:
        self._folder = Path(model.path)
        self._settings = read_extra_config(config, ShardedStateSettings, f'{{"pattern": "{PATTERN}"}}')

    def _files(self) -> list[Path]:
        assert self.parallel is not None, "set by the worker"
        place = Place.of(self.parallel)
        found: list[Path] = []
        while (file := self._folder / self._settings.name(place.rank, len(found))).is_file():
            found.append(file)
        if not found:
            raise ConfigError(
                f"{file} is missing: the folder has no state of rank {place.rank} of {place}. Write it with pelton "
                "save-sharded-state, or use the size that it was saved with."
            )
        return found

    def weights(self) -> Iterator[tuple[str, LazyWeight]]:
        files = {file: self._slices(file) for file in self._files()}
        num_parts = Counter(name for slices in files.values() for name, _, _ in slices.values())
        reader, found = ParallelReader(), dict[str, SlicedWeight]()
        with reader.running():
            for file, slices in files.items():
                for key, weight in mapped_weights(file, None, reader):
                    if key not in slices:
                        yield key, weight
                        continue
                    name, shape, part = slices[key]
                    whole = found.setdefault(name, SlicedWeight(name, shape))
                    whole.parts.append((*part, weight))
                    if len(whole.parts) == num_parts[name]:
                        yield name, found.pop(name)

    def _slices(self, file: Path) -> dict[str, tuple[str, tuple[int, ...], tuple[int, int]]]:
        assert self.parallel is not None, "set by the worker"
        place = Place.of(self.parallel)
        said = header_of(FileSource(file)).metadata.get(METADATA)
        if said is None:
            raise ConfigError(
                f"{file} does not say how it was sharded: it is not of pelton save-sharded-state. Write it from the checkpoint."
            )
        try:
            fields = needs_mapping(json.loads(said), f"{METADATA} of {file}")
            world = tuple(int(size) for size in fields["world"])
            slices = {
                key: (one["name"], tuple(one["shape"]), (one["dim"], one["start"]))
                for key, one in fields["slices"].items()
            }
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{file} has a {METADATA} that cannot be read ({error}). Write it from the checkpoint."
            ) from error
        if world != place.world:
            saved = Place(0, (world[0], world[1]))
            raise ConfigError(f"{file} was saved with {saved}, and this is {place}. Use what it was saved with.")
        return slices

    @property
    def total_bytes(self) -> int:
        return sum(file.stat().st_size for file in self._files())


class SlicedWeight(LazyWeight):
    """Slices of a tensor, of which nothing else is there."""

    def __init__(self, name: str, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self.parts: list[tuple[int, int, LazyWeight]] = []  # dim, first of the tensor
        self._name = name

    def read(self, dim: int | None = None, start: int = 0, stop: int | None = None) -> Tensor:
        part, first, last = self._part(dim, start, stop)
        return part.read(dim, first, last)

    def fill(self, target: Tensor, dim: int | None = None, start: int = 0, stop: int | None = None) -> bool:
        part, first, last = self._part(dim, start, stop)
        return part.fill(target, dim, first, last)

    def fill_later(self, target: Tensor, dim: int | None = None, start: int = 0, stop: int | None = None) -> bool:
        part, first, last = self._part(dim, start, stop)
        return part.fill_later(target, dim, first, last)

    def _part(self, dim: int | None, start: int, stop: int | None) -> tuple[LazyWeight, int, int]:
        for own, first, part in self.parts:
            last = self.shape[own] if stop is None else stop
            if dim == own and first <= start and last <= first + part.shape[own]:
                return part, start - first, last - first
        held = ", ".join(f"[{first}, {first + part.shape[own]}) along {own}" for own, first, part in self.parts)
        wanted = "all of it" if dim is None else f"[{start}, {stop}) along {dim}"
        raise ConfigError(
            f"The sharded state has {held} of {self._name}, and {wanted} is asked for: it was saved with other settings. Write it "
            "from the checkpoint with those of now."
        )
