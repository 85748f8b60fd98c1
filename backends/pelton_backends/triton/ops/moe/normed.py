"""The op of experts behind its norm, for few and for some tokens: sum, norm and the router's product are one kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton

from pelton_backends.triton.launch import Launcher, alignment
from pelton_backends.triton.ops.linear.gemv import inner_contiguous
from pelton_backends.triton.ops.linear.large_batch import add_norm
from pelton_backends.triton.ops.moe import choose
from pelton_backends.triton.ops.moe.experts import FEW_LOGITS, BoundMoe, TritonMoe
from pelton_backends.triton.runtime import has_pdl, launch_options

if TYPE_CHECKING:
    from torch import Tensor

    from pelton.ops.moe import AddNormMoe, AddNormMoeNeeds, AddNormMoeTensors

MAX_HIDDEN_SIZE = 8192  # a row, and two of the router, are held in the registers of one program
MOST_TILED, MAX_TILED_SIZE = 256, 4096  # tokens, and numbers of a row, of which 8 rows and 16 of the router are
_FEW_ROWS, _TILE_ROWS, _TILE_TOKENS = 2, 16, 8  # experts of a program, and tokens
_MANY_TOKENS, _MANY_TILE_ROWS = 129, 32
"""From so many tokens on a program has more experts, and each token's norm is computed half as often. A layer of Qwen3-30B-A3B's experts
in a chain on an H200: 160, 192 and 256 tokens 312.1, 314.0 and 320.9 us for 316.6, 319.9 and 325.0; 128 tokens 293.1 for 293.0."""

_normed_few_logits = Launcher(choose.normed_few_logits_kernel)
_normed_logits = Launcher(choose.normed_logits_kernel)


class FewAddNormMoe:
    """Up to `FEW_LOGITS` tokens, of two-byte dtypes up to `MOST_TILED`; on one rank."""

    handles = TritonMoe.handles | {"unit_offset"}

    @staticmethod
    def unsupported(needs: AddNormMoeNeeds) -> list[str]:
        reasons = TritonMoe.unsupported(needs.moe)
        if needs.norm.size > MAX_HIDDEN_SIZE:
            reasons.append(f"hidden size {needs.norm.size}, at most {MAX_HIDDEN_SIZE}")
        return reasons

    @staticmethod
    def token_range(needs: AddNormMoeNeeds) -> tuple[int, int | None]:
        return 1, MOST_TILED if _is_tiled(needs) else FEW_LOGITS

    @staticmethod
    def bind(needs: AddNormMoeNeeds, tensors: AddNormMoeTensors) -> AddNormMoe:
        return _BoundAddNormMoe(needs, tensors)


def _is_tiled(needs: AddNormMoeNeeds) -> bool:
    return needs.dtype != "float32" and needs.norm.size <= MAX_TILED_SIZE


class _BoundAddNormMoe:
    """Shapes and dtypes as `pelton.ops.moe.AddNormMoe` says."""

    def __init__(self, needs: AddNormMoeNeeds, tensors: AddNormMoeTensors) -> None:
        self._moe = BoundMoe(needs.moe, tensors.moe)
        self._norm, self._router = tensors.norm, tensors.moe.router
        self._num_experts, hidden = needs.moe.routing.num_experts, needs.norm.size
        pdl, padded = has_pdl(self._router.device), triton.next_power_of_2(hidden)
        self._spec = needs.norm
        self._constants = {
            "EPS": needs.norm.eps, "UNIT_OFFSET": needs.norm.unit_offset, "E": self._num_experts, "H": hidden, "HB": padded,
        }  # fmt: skip
        self._few = {**self._constants, "R": _FEW_ROWS, "PDL": pdl}
        warps = 8 if padded <= 2048 else 16
        self._tile = {**self._constants, "R": _TILE_ROWS, "T": _TILE_TOKENS, "W": min(warps, padded // 16), "PDL": pdl}
        self._few_options = {"num_warps": 4 if padded <= 4096 else 8, **launch_options(pdl)}
        self._large_tile = {**self._tile, "R": _MANY_TILE_ROWS} if padded <= 2048 else self._tile
        self._tile_options = {"num_warps": warps, **launch_options(pdl)}
        self.read_by = self._moe.read_by

    def __call__(self, hidden: Tensor, residual: Tensor | None, slot_mapping: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        num_tokens = hidden.shape[0]
        is_few = num_tokens <= FEW_LOGITS
        if not is_few and self._router.dtype != hidden.dtype:
            residual, x = add_norm(hidden, residual, self._norm, self._spec)
            return self._moe(x, slot_mapping), x, residual
        hidden = inner_contiguous(hidden)
        x = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)
        total = None if residual is None else torch.empty_like(x)
        residual = None if residual is None else inner_contiguous(residual)
        logits = torch.empty((num_tokens, self._num_experts), dtype=torch.float32, device=x.device)
        strides = hidden.stride(0), 0 if residual is None else residual.stride(0)
        key = (
            x.dtype, self._router.dtype, self._norm.dtype, x.device, *strides, residual is None,
            alignment(hidden, residual, self._norm, self._router), *self._constants.values(),
        )  # fmt: skip
        arguments = hidden, residual, self._norm, self._router, x, total, logits
        if is_few:
            grid = triton.cdiv(self._num_experts, _FEW_ROWS), num_tokens
            _normed_few_logits(key, grid, (*arguments, *strides), self._few, **self._few_options)
        else:
            tile = self._tile if num_tokens < _MANY_TOKENS else self._large_tile
            grid = triton.cdiv(self._num_experts, tile["R"]), triton.cdiv(num_tokens, _TILE_TOKENS)
            _normed_logits((*key, tile["R"]), grid, (*arguments, num_tokens, *strides), tile, **self._tile_options)
        out = self._moe.routed(x, slot_mapping, logits)
        return out, x, hidden if total is None else total
