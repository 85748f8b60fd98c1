"""Matrices in floating point of four bits, e2m1, whose blocks have scales: NVFP4 and MXFP4. They are decoded while they load.

    weight = e2m1(code) * scale of its block [* or / a number of the whole matrix], in float32, rounded once to the model's dtype

NVFP4 has blocks of 16 with scales in e4m3 and a float32 for the matrix, MXFP4 blocks of 32 with powers of two (OCP Microscaling Formats
1.0, section 5.2). Inputs are not rounded, whatever the checkpoint says of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from pelton.errors import ConfigError
from pelton.quantization.plain import PlainWeights
from pelton_plugins.quantization.cache_scales import take_cache_scales
from pelton_plugins.quantization.grouped import Collector
from pelton_plugins.quantization.numbers import E4M3
from pelton_plugins.weight_forms.dummy import DummyTensor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from pelton.model.build import BuildConfig
    from pelton.ops.interface import LinearWeights
    from pelton.quantization.interface import LinearShard

NUMBERS_AT_ONCE = 2**24
"""While a matrix is decoded: little is held beside the result."""
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS = 127  # of a power of two's exponent
_E4M3_SCALES, _DUMMY_WHOLE = (40.0, 440.0), 3e-5
"""Of dummy weights; the next one too: times numbers of up to 6 they are 0.02."""
_EXPONENTS = (118, 121)


@dataclass(frozen=True, slots=True)
class Fp4Layout:
    """Names of a matrix's tensors in a checkpoint: `codes` [out, in / 2] uint8, the first number of two in the lower half, and `scales`
    [out, in / block]; `whole`, a number that all are multiplied by, or divided by."""

    codes: str
    scales: str
    block: int
    whole: str | None = None
    divides: bool = False
    unread: tuple[str, ...] = ()


NVFP4 = Fp4Layout("weight", "weight_scale", 16, "weight_scale_2", unread=("input_scale",))
"""As ModelOpt writes it."""
NVFP4_PACKED = Fp4Layout(
    "weight_packed", "weight_scale", 16, "weight_global_scale", divides=True, unread=("input_global_scale",)
)
"""As compressed-tensors writes it, and the next one."""
MXFP4_PACKED = Fp4Layout("weight_packed", "weight_scale", 32)


class Fp4Weights(PlainWeights):
    """Plain weights from codes and scales; is_kept: of a matrix, whether the checkpoint has it in the model's dtype."""

    def __init__(self, name: str, layout: Fp4Layout, is_kept: Callable[[str], bool] = lambda name: False) -> None:
        self.name, self._layout, self._is_kept = name, layout, is_kept

    @property
    def decoded(self) -> Fp4Weights:
        return self

    @property
    def experts(self) -> DecodedExperts:
        return DecodedExperts()

    def create(
        self, config: BuildConfig, shards: Sequence[LinearShard], *, bias: bool, is_vocabulary: bool = False
    ) -> LinearWeights:
        take_cache_scales(config)
        is_embedding = is_vocabulary and not shards[0].name.endswith("lm_head")
        create = PlainWeights().create if is_embedding else super().create
        return create(config, shards, bias=bias, is_vocabulary=is_vocabulary)

    def expect(self, config: BuildConfig, shard: LinearShard, target: Tensor) -> None:
        if self._is_kept(shard.name):
            super().expect(config, shard, target)
            return
        layout, blocks = self._layout, shard.num_cols // self._layout.block
        if shard.num_cols % layout.block:
            raise ConfigError(
                f"{shard.name} has {shard.num_cols} columns, and quantization_config says blocks of {layout.block}. Check that "
                "config.json belongs to these weights."
            )
        wanted: dict[str, tuple[int, ...] | None] = {
            layout.codes: (shard.num_rows, shard.num_cols // 2),
            layout.scales: (shard.num_rows, blocks),
        }
        if layout.whole is not None:
            wanted[layout.whole] = None
        dummy = partial(self._dummy, shard)
        Collector(config, shard.name, wanted, partial(self._decode, shard, target), dummy)
        for name in layout.unread:
            config.weights.ignore(re.escape(f"{shard.name}.{name}"))

    def _dummy(self, shard: LinearShard) -> Mapping[str, DummyTensor | Tensor]:
        layout, shape = self._layout, (shard.num_rows, shard.num_cols // self._layout.block)
        dtype, bounds = (E4M3, _E4M3_SCALES) if layout.whole is not None else (torch.uint8, _EXPONENTS)
        found: dict[str, DummyTensor | Tensor] = {
            layout.codes: DummyTensor((shard.num_rows, shard.num_cols // 2), torch.uint8),
            layout.scales: DummyTensor(shape, dtype, bounds),
        }
        if layout.whole is not None:
            found[layout.whole] = torch.tensor(1 / _DUMMY_WHOLE if layout.divides else _DUMMY_WHOLE)
        return found

    def _decode(self, shard: LinearShard, target: Tensor, found: Mapping[str, Tensor]) -> None:
        layout = self._layout
        codes, scales = found[layout.codes], self._scales(shard, found[layout.scales])
        if codes.dtype != torch.uint8:
            raise _other_dtype(shard, layout.codes, codes, "uint8")
        if layout.whole is not None:
            whole = found[layout.whole].float().flatten()
            if len(whole) != 1:
                raise ConfigError(
                    f"{shard.name}.{layout.whole} is {list(found[layout.whole].shape)}; expected one number. Check that config.json "
                    "belongs to these weights."
                )
            scales = scales / whole if layout.divides else scales * whole
        table = torch.tensor([*_E2M1, *(-number for number in _E2M1)], device=codes.device)
        first, step = shard.rows[0], max(NUMBERS_AT_ONCE // shard.num_cols, 1)
        for start in range(first, shard.rows[1], step):
            rows = slice(start, min(start + step, shard.rows[1]))
            numbers = table[torch.stack([codes[rows] & 15, codes[rows] >> 4], dim=-1).flatten(1).int()]
            numbers = (numbers.unflatten(1, (-1, layout.block)) * scales[rows].unsqueeze(-1)).flatten(1)
            target[rows.start - first : rows.stop - first] = numbers[:, slice(*shard.cols)]

    def _scales(self, shard: LinearShard, scales: Tensor) -> Tensor:
        if self._layout.block == MXFP4_PACKED.block:
            if scales.dtype not in (torch.uint8, torch.float8_e8m0fnu):
                raise _other_dtype(shard, self._layout.scales, scales, "uint8")
            exponents = scales.view(torch.uint8).to(torch.int32) - _BIAS
            return torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents)
        if scales.dtype != E4M3:
            raise _other_dtype(shard, self._layout.scales, scales, "float8_e4m3fn")
        return scales.float()


class DecodedExperts:
    """Matrices of experts that no op reads as they are."""

    def form(self, shard: LinearShard) -> None:
        return None

    def expect(self, config: BuildConfig, shard: LinearShard, weight: Tensor, scale: Tensor) -> None:
        raise ConfigError(f"{shard.name} is in four bits, and other experts of its layer are not.")


def _other_dtype(shard: LinearShard, name: str, tensor: Tensor, wanted: str) -> ConfigError:
    return ConfigError(
        f"{shard.name}.{name} is {str(tensor.dtype).removeprefix('torch.')}, and config.json's quantization_config says it is {wanted}. "
        "Check that config.json belongs to these weights."
    )
