"""The memory of adapters' low-rank matrices, and the layers that they are for.

A layer registers when it is made; memory is allocated when all have, and every layer sees its part of all slots at an address that
never changes. How it lies: `adapter_slots.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pelton.errors import ConfigError
from pelton.lora.layers import AdapterLayer, BaseProduct
from pelton.lora.op import AdaptedNeeds, AdaptedTensors, Lora, LoraNeeds, LoraTensors
from pelton_platforms.device.adapter_rows import AdapterRows
from pelton_platforms.device.adapter_slots import LayeredSlotMemory, PackedLayer, SlotMemory, aligned

if TYPE_CHECKING:
    import torch

    from pelton.config import EngineConfig, LoRAConfig
    from pelton.layers.norm import RMSNorm
    from pelton.lora.rows import AdapterRowTensors
    from pelton.model.build import BuildConfig
    from pelton.quantization.interface import LinearShard

_LEAST_RANK = 16  # of a matrix that tensor cores multiply


@dataclass(frozen=True, slots=True)
class AdapterPart:
    """One matrix of the checkpoint, or some of its rows, and where A and B lie in a packed adapter."""

    shard: LinearShard
    a_start: int  # of [R, columns]
    b_start: int
    b_strides: tuple[int, int]  # of [R, rows]

    @property
    def num_rows(self) -> int:
        return self.shard.rows[1] - self.shard.rows[0]

    @property
    def num_cols(self) -> int:
        return self.shard.cols[1] - self.shard.cols[0]


class AdapterMemory:
    """A worker's `AdapterLayers`."""

    def __init__(self, config: LoRAConfig, rows: AdapterRowTensors) -> None:
        self.rows = rows
        self.num_slots, self.max_rank = config.max_loras, config.max_lora_rank
        self.rank = max(1 << (config.max_lora_rank - 1).bit_length(), _LEAST_RANK)
        self.parts: dict[str, list[AdapterPart]] = {}
        """By the name of the matrix in the checkpoint, without ".weight": several where it is several matrices in one, each of which
        has the whole A and its own rows of B."""
        self.refused: dict[str, str] = {}
        """Matrices, or whole modules of them, that take none, and why."""
        self.has_heads_left_out = False
        """The model pools: adapters may have been trained on it with or without a head around it."""
        self._is_unread: Callable[[str], bool] = lambda name: False
        self.slots: SlotMemory | None = None
        self._targets = frozenset(config.lora_target_modules)
        self._layers: list[AdapterLayer] = []
        self._size = 0

    def add(
        self,
        build: BuildConfig,
        shards: Sequence[LinearShard],
        *,
        norm: RMSNorm | None = None,
        activation: str | None = None,
        base: BaseProduct | None = None,
    ) -> AdapterLayer | None:
        """See `AdapterLayers`."""
        left_out = [shard.name for shard in shards if self._targets and _last(shard.name) not in self._targets]
        for name in left_out:
            self.refuse(name, "lora_target_modules, with which the engine was started, leaves it out")
        if len(left_out) == len(shards):
            return None
        num_cols = shards[0].cols[1] - shards[0].cols[0]
        sizes = tuple(shard.rows[1] - shard.rows[0] for shard in shards)
        needs = LoraNeeds(
            dtype=build.dtype_name, in_features=num_cols, parts=sizes, rank=self.rank, num_slots=self.num_slots,
            norm=None if norm is None else norm.spec, activation=activation,
        )  # fmt: skip
        layer = AdapterLayer(needs, None if norm is None else norm.weight, self.rows, base)
        layer.a_start = self._reserve(len(shards) * self.rank * num_cols)
        layer.b_start = self._reserve(sum(sizes) * self.rank)
        row, strides = 0, self._b_strides(build, sum(sizes))
        for index, (shard, size) in enumerate(zip(shards, sizes, strict=True)):
            a_start = layer.a_start + index * self.rank * num_cols
            if shard.name not in left_out:
                part = AdapterPart(shard, a_start, layer.b_start + row * strides[1], strides)
                self.parts.setdefault(shard.name, []).append(part)
            row += size
        self._layers.append(layer)
        return layer

    def refuse(self, name: str, why: str) -> None:
        """See `AdapterLayers`."""
        self.refused[name] = why

    def find(self, name: str) -> str:
        """Return what this model calls the matrix that an adapter calls `name`: the same, but for a model that pools, whose body
        may be right below the adapter's names, or behind one more name ("model.", "bert.")."""
        if name in self.parts or not self.has_heads_left_out:
            return name
        inner = name.partition(".")[2]
        if inner in self.parts:
            return inner
        outer = dict.fromkeys(f"{part.partition('.')[0]}.{name}" for part in self.parts)
        return next((one for one in outer if one in self.parts), name)

    def why_refused(self, name: str) -> str | None:
        """Return the reason against a matrix that the model knows and that takes none."""
        part = name
        while part:
            if part in self.refused:
                return self.refused[part]
            part = part.rpartition(".")[0]
        return "what this engine answers is computed without it" if self._is_unread(f"{name}.weight") else None

    @property
    def size(self) -> int:
        """Numbers of a packed adapter."""
        return self._size

    @property
    def num_bytes(self) -> int:
        return 0 if self.slots is None else self.slots.tensor.nbytes

    @property
    def target_modules(self) -> list[str]:
        """Last parts of the names, as adapter_config.json has them."""
        return sorted({_last(name) for name in self.parts})

    def allocate(self, build: BuildConfig) -> None:
        """Once, when the model is built. Raises `ConfigError` where it has no layer that takes adapters, or no memory."""
        unknown = self._targets - {_last(name) for name in self.parts}
        if unknown and build.parallel.stages is None:  # a stage has some of the layers
            known = sorted({_last(name) for name in [*self.parts, *self.refused]})
            raise ConfigError(
                f"lora_target_modules has {', '.join(sorted(unknown))}, which no layer of this model is; there are {', '.join(known)}."
            )
        self.has_heads_left_out, self._is_unread = build.pooling is not None, build.weights.ignores
        if not self._layers:
            why = "; ".join(sorted(set(self.refused.values())))
            raise ConfigError(
                f"enable_lora is set, and no layer of this model takes adapters{why and f' ({why})'}. Leave it out."
            )
        packed = [
            PackedLayer(
                layer.a_start, layer.b_start, len(layer.needs.parts) * self.rank, layer.needs.in_features, sum(layer.needs.parts)
            )
            for layer in self._layers
        ]  # fmt: skip
        memory = SlotMemory if build.device.type == "cpu" else LayeredSlotMemory
        try:
            self.slots = memory(
                packed,
                size=self._size,
                num_slots=self.num_slots,
                rank=self.rank,
                dtype=build.dtype,
                device=build.device,
            )
        except RuntimeError as error:
            raise ConfigError(
                f"Adapters of rank {self.rank} take {self._size * build.dtype.itemsize} bytes each, and max_loras is "
                f"{self.num_slots}: so much memory is not left. Set max_loras or max_lora_rank lower."
            ) from error
        for index, layer in enumerate(self._layers):
            needs, (a, b) = layer.needs, self.slots.of(index)
            tensors, base = LoraTensors(a, b, self.rows, layer.norm), layer.base
            if base is None:
                bind: Callable[..., Lora] = build.ops.bind
                layer.call = bind("lora", needs, tensors)
            else:
                adapted = AdaptedNeeds(base=base.needs, adapter=needs)
                layer.product = build.ops.bind(f"lora_{base.op}", adapted, AdaptedTensors(base.tensors, tensors))

    def _b_strides(self, build: BuildConfig, columns: int) -> tuple[int, int]:
        """On a CPU neighbouring columns are lanes; elsewhere a program takes all ranks of some columns."""
        return (columns, 1) if build.device.type == "cpu" else (1, self.rank)

    def _reserve(self, count: int) -> int:
        start = self._size
        self._size += aligned(count)
        return start


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def make_adapter_memory(config: EngineConfig, device: torch.device, max_num_tokens: int) -> AdapterMemory | None:
    """Where the layers of a model that is about to be built register; None without `enable_lora`."""
    if not config.lora.enable_lora:
        return None
    rows = AdapterRows(max_num_tokens=max_num_tokens, num_slots=config.lora.max_loras, device=device)
    return AdapterMemory(config.lora, rows)
