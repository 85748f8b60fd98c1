"""Methods with blocks of 32 numbers on every device: panels on CPUs (`pelton.ops.packed_blocks`), groups with minima on GPUs.

A block's numbers are code * scale + minimum whatever its kind, exactly: q4_0's minimum is -8 scales, q8_0's -128. So the parts of a
merged matrix may differ in kind; in groups all have 8 bits where one of them has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from pelton.errors import ConfigError
from pelton.ops.interface import LinearSpec, LinearWeights
from pelton.ops.packed_blocks import BLOCK, BlockKind
from pelton.quantization.plain import PlainWeights, make_bias
from pelton_plugins.weight_forms.expert_codes import put_codes
from pelton_plugins.weight_forms.groups import MINIMA, codes_shape, pack_codes, pack_minima
from pelton_plugins.weight_forms.packed import PackedWeights

if TYPE_CHECKING:
    from torch import Tensor

    from pelton.model.build import BuildConfig
    from pelton.model.loading import LazyWeight
    from pelton.quantization.interface import LinearShard

NUMBERS_AT_ONCE = 2**22
ZERO_CODES = {"q4_0": 8, "q8_0": 128}
"""The code of the number 0, where a block has no minimum."""


def split_blocks(blocks: Tensor, kind: BlockKind) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of blocks [n, bytes] uint8 -> codes [n, in] int32, scales and minima [n, in / 32] float16."""
    blocks = blocks.reshape(blocks.shape[0], -1, kind.block_bytes)
    heads = blocks[..., : kind.head_bytes].contiguous().view(torch.float16)
    quants = blocks[..., kind.head_bytes :]
    if kind.name == "q8_0":
        codes = quants.contiguous().view(torch.int8).int() + ZERO_CODES["q8_0"]
    else:
        codes = torch.cat([quants & 15, quants >> 4], dim=-1).int()
    scales = heads[..., 0]
    return codes.flatten(1), scales, heads[..., 1] if kind.has_minimum else scales * -ZERO_CODES[kind.name]


def is_for_cpu(config: BuildConfig) -> bool:
    return (config.device_type or config.device.type) == "cpu"


class BlockWeights(PackedWeights):
    """A `QuantizationMethod` for blocks, in the form that the device's kernels read."""

    @property
    def experts(self) -> BlockExperts:
        return BlockExperts(self)

    @property
    def decoded(self) -> PlainWeights:
        """Read what an op takes in the model's dtype as the checkpoint has it, without a detour over blocks."""
        return PlainWeights()

    def create(
        self, config: BuildConfig, shards: Sequence[LinearShard], *, bias: bool, is_vocabulary: bool = False
    ) -> LinearWeights:
        if is_for_cpu(config):
            return super().create(config, shards, bias=bias, is_vocabulary=is_vocabulary)
        return self.create_groups(config, shards, bias=bias, is_vocabulary=is_vocabulary)

    def create_groups(
        self, config: BuildConfig, shards: Sequence[LinearShard], *, bias: bool, is_vocabulary: bool = False
    ) -> LinearWeights:
        kinds = self.kinds(config, shards, is_vocabulary=is_vocabulary)
        if not kinds:
            return PlainWeights().create(config, shards, bias=bias, is_vocabulary=is_vocabulary)
        bits = 8 if any(kind.name == "q8_0" for kind in kinds) else 4
        num_cols = shards[0].cols[1] - shards[0].cols[0]
        counts = [shard.rows[1] - shard.rows[0] + shard.padding for shard in shards]
        codes = torch.zeros(codes_shape(sum(counts), num_cols, bits), dtype=torch.int32, device=config.device)
        scales = torch.zeros(sum(counts), num_cols // BLOCK, dtype=torch.int32, device=config.device)
        first = 0
        for shard, kind, count in zip(shards, kinds, counts, strict=True):
            fill = partial(self._fill_groups, shard, kind, bits, scales[first : first + count])
            shape = (shard.num_rows, shard.num_cols)
            config.weights.expect(f"{shard.name}.weight", shape, codes[first : first + count], fill=fill)
            first += count
        vector = make_bias(config, shards) if bias else None
        spec = LinearSpec(
            in_features=num_cols, out_features=sum(counts), weight_format=MINIMA[bits], has_bias=vector is not None
        )
        return LinearWeights(spec, {"codes": codes, "scales": scales}, vector)

    def _fill_groups(
        self, shard: LinearShard, kind: BlockKind, bits: int, scales: Tensor, weight: LazyWeight, codes: Tensor
    ) -> None:
        for rows, numbers, scale, minimum in self.pieces(shard, kind, weight, codes.device):
            codes[rows] = pack_codes(numbers, bits)
            scales[rows] = pack_minima(scale, minimum)

    def expect_panels(self, config: BuildConfig, shard: LinearShard, kind: BlockKind, panels: Tensor) -> None:
        """Tell `config.weights` what fills this rank's part of the matrix in `panels`."""
        shape = (shard.num_rows, shard.num_cols)
        config.weights.expect(f"{shard.name}.weight", shape, panels, fill=partial(self._fill, kind, shard))

    def pieces(
        self, shard: LinearShard, kind: BlockKind, weight: LazyWeight, device: torch.device
    ) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
        """Some of this rank's rows after others: which, their codes [n, in], scales and minima [n, in / 32]."""
        (first, last), (left, right) = shard.rows, (col // BLOCK * kind.block_bytes for col in shard.cols)
        step = max(NUMBERS_AT_ONCE // shard.num_cols, 1)
        for start in range(first, last, step):
            stop = min(start + step, last)
            blocks = self.read_blocks(weight, kind, start, stop)[:, left:right].to(device)
            codes, scale, minimum = split_blocks(blocks, kind)
            if not torch.isfinite(minimum).all():
                raise ConfigError(f"{shard.name} has a scale or minimum beyond float16. Leave quantization unset.")
            yield slice(start - first, stop - first), codes, scale, minimum


class BlockExperts:
    """Matrices of experts as codes and words, or in panels (`PackedExperts` and `ExpertBlocks` of `pelton_plugins.models.experts`). Where a
    rank's part cuts a block, and where the file has them so, they are in the model's dtype."""

    def __init__(self, method: BlockWeights) -> None:
        self._method = method

    def form(self, shard: LinearShard) -> tuple[str, int | None] | None:
        kind = self.block(shard)
        return None if kind is None else (MINIMA[8 if kind.name == "q8_0" else 4], BLOCK)

    def block(self, shard: LinearShard) -> BlockKind | None:
        kind = self._method.kind(shard, is_vocabulary=False)
        return None if kind is None or any(edge % BLOCK for edge in shard.cols) else kind

    def expect_blocks(self, config: BuildConfig, shard: LinearShard, panels: Tensor) -> None:
        self._method.expect_panels(config, shard, _kind(self._method, shard), panels)

    def expect(self, config: BuildConfig, shard: LinearShard, weight: Tensor, scale: Tensor) -> None:
        fill = partial(self._fill, shard, scale)
        config.weights.expect(f"{shard.name}.weight", (shard.num_rows, shard.num_cols), weight, fill=fill)

    def _fill(self, shard: LinearShard, scale: Tensor, weight: LazyWeight, target: Tensor) -> None:
        for rows, codes, scales, minima in self._method.pieces(
            shard, _kind(self._method, shard), weight, target.device
        ):
            put_codes(codes, target[rows])
            scale[rows] = pack_minima(scales, minima)


def _kind(method: BlockWeights, shard: LinearShard) -> BlockKind:
    kind = method.kind(shard, is_vocabulary=False)
    assert kind is not None, "see `form`"
    return kind
