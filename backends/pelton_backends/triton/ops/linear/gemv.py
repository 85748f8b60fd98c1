"""Linear ops for one to eight rows: one kernel a call, bound by reading the weights once.

This file checks, chooses tiles and launches; the kernels are in `gemv_kernels.py`. More rows: `small_batch.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton

from pelton.ops.interface import (
    AddNormGatedLinear,
    AddNormGatedLinearNeeds,
    AddNormGatedLinearTensors,
    AddNormLinear,
    AddNormLinearNeeds,
    AddNormLinearTensors,
    Linear,
    LinearNeeds,
    LinearSpec,
    LinearTensors,
    NormSpec,
)
from pelton.platform.compiling import launch
from pelton_backends.triton.ops.linear.gemv_kernels import (
    add_norm_gated_linear_kernel,
    add_norm_linear_kernel,
    linear_kernel,
)
from pelton_backends.triton.ops.linear.refusals import product_refusals
from pelton_backends.triton.runtime import has_pdl, launch_options

if TYPE_CHECKING:
    from torch import Tensor

MAX_ROWS = 8
DTYPES = ("bfloat16", "float16", "float32")
HANDLES = frozenset(["unit_offset", "has_bias", "post_norm", "tp_size", "weight_format"])
"""Optional needs that products with plain weights have read about."""

_MOST_REGISTERS = 96
"""Of a thread where a large matrix has adapters: as many programs run at once as without."""
LARGE_BYTES = 24 << 20  # from here on a matrix is streamed: it takes more than one wave of programs


@dataclass(frozen=True, slots=True)
class Tile:
    """Sizes of what one program computes, in the words of `gemv_kernels.py`: R rows by NUM pieces of W C 32 columns."""

    W: int  # warps
    R: int  # with two parts (gate and up), half of them in each
    C: int
    NUM: int
    AHEAD: int  # pieces in registers at a time
    DOT: bool

    @property
    def options(self) -> dict[str, int]:
        return {
            "W": self.W, "R": self.R, "C": self.C, "NUM": self.NUM, "AHEAD": self.AHEAD, "DOT": self.DOT,
            "num_warps": self.W,
        }  # fmt: skip


def is_large(out_features: int, in_features: int, element_size: int) -> bool:
    return out_features * in_features * element_size >= LARGE_BYTES


def choose_tile(out_features: int, in_features: int, num_rows: int, element_size: int, num_matrices: int = 1) -> Tile:
    """The tile of a program, as measured on an H200 (132 multiprocessors, 4.29 TB/s). num_matrices: 2 for gate and up.

    Small matrices take tensor cores: what counts is the time from the inputs' arrival to the last store. One row of a
    large one streams on plain multiplications: up to 4.5 TB/s, where tensor cores get 3.9 TB/s.
    """
    total_rows = out_features * num_matrices
    if element_size == 4 or (num_rows == 1 and is_large(total_rows, in_features, element_size)):
        is_dot, W, C, AHEAD = False, (4 if in_features <= 4096 else 8), 8, 16 // element_size
        R = 8  # 16 KiB a program, and several programs a multiprocessor
        while R > 2 and R * in_features * element_size > 16384:
            R //= 2
    elif total_rows >= 2048:
        is_dot, W, C, AHEAD, R = (True, 4, 8, 1, 16) if in_features <= 1024 else (True, 8, 4, 3, 16)
        if num_rows > 2 and in_features <= 1024 and not is_large(total_rows, in_features, element_size):
            R = 32  # each program norms the rows: fewer programs
    else:  # eight rows a program: 16 would leave half of the multiprocessors idle
        is_dot, W, C, AHEAD, R = True, 8, 4, 3, 8
        if num_rows == 1 and in_features <= 2048:
            W = 16
    while C > 1 and in_features <= W * C * 16:
        C //= 2
    num = triton.cdiv(in_features, W * C * 32)
    return Tile(W, R, C, num, min(num, AHEAD), is_dot)


def most_rows(linear: LinearSpec, dtype: str) -> int:
    """Return the most rows: one of a large matrix; with more, kernels that norm the rows once (`small_batch.py`) are as fast or faster."""
    return 1 if is_large(linear.out_features, linear.in_features, 4 if dtype == "float32" else 2) else MAX_ROWS


def padded_rows(num_tokens: int) -> int:
    """Rows that a kernel is compiled for: 1, 2, 4 or 8."""
    return 1 << (num_tokens - 1).bit_length()


def inner_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


class _AddNorm:
    """Common part of the two ops with a norm: their arguments, and a new tensor for the residual."""

    def __init__(self, norm: NormSpec, post_norm: NormSpec | None, tensors: Any) -> None:
        self.weight: Tensor = tensors.linear.tensors["weight"]
        self.bias: Tensor | None = tensors.linear.bias
        self.norm, self.post_norm = tensors.norm, tensors.post_norm
        self.eps, self.post_eps = norm.eps, 0.0 if post_norm is None else post_norm.eps
        self.pdl = has_pdl(self.weight.device)
        self.flags = {
            "HAS_POST": post_norm is not None, "UNIT_OFFSET": norm.unit_offset,
            "POST_UNIT_OFFSET": post_norm is not None and post_norm.unit_offset, "HAS_BIAS": self.bias is not None,
            "K": norm.size, "PDL": self.pdl, **launch_options(self.pdl),
        }  # fmt: skip

    def launch(
        self,
        kernel: Any,
        hidden: Tensor,
        residual: Tensor | None,
        out_features: int,
        tile: Tile,
        parts: int = 1,
        low_rows: int = 0,
        **options: Any,
    ) -> tuple[Tensor, Tensor]:
        """-> (out [T, out_features], the new residual). low_rows: of A, which further programs multiply (`lora/gemv.py`)."""
        hidden = inner_contiguous(hidden)
        residual = None if residual is None else inner_contiguous(residual)
        num_tokens, size = hidden.shape
        out = torch.empty((num_tokens, out_features), dtype=hidden.dtype, device=hidden.device)
        total = hidden
        if residual is not None or self.post_norm is not None:
            # Not in place: programs read the old rows while the first one writes the new ones.
            total = torch.empty((num_tokens, size), dtype=hidden.dtype, device=hidden.device)
        low_programs = triton.cdiv(low_rows, tile.R)
        if low_programs and self.pdl and not tile.DOT:
            options["maxnreg"] = _MOST_REGISTERS
        launch(
            kernel, (low_programs + triton.cdiv(out_features, tile.R // parts),),
            hidden, residual, self.norm, self.post_norm, self.weight, self.bias, out, total, self.eps, self.post_eps,
            num_tokens, hidden.stride(0), 0 if residual is None else residual.stride(0),
            HAS_RESIDUAL=residual is not None, N=out_features, M=padded_rows(num_tokens), LOW_PROGRAMS=low_programs,
            **tile.options, **self.flags, **options,
        )  # fmt: skip
        return out, total


def refusals(needs: Any) -> list[str]:
    return product_refusals(needs, ("plain",), DTYPES, max_hidden_size=None)


class GemvAddNormLinear:
    """residual' = [post_norm](hidden) + residual; linear(norm(residual')): `add_norm_linear_kernel`."""

    handles = HANDLES

    @staticmethod
    def unsupported(needs: AddNormLinearNeeds) -> list[str]:
        return refusals(needs)

    @staticmethod
    def token_range(needs: AddNormLinearNeeds) -> tuple[int, int | None]:
        return 1, most_rows(needs.linear, needs.dtype)

    @staticmethod
    def bind(needs: AddNormLinearNeeds, tensors: AddNormLinearTensors) -> AddNormLinear:
        return bind_add_norm_linear(needs, tensors)


class GemvAddNormGatedLinear:
    """As `GemvAddNormLinear`, with activation(gate) * up: `add_norm_gated_linear_kernel`."""

    handles = HANDLES

    @staticmethod
    def unsupported(needs: AddNormGatedLinearNeeds) -> list[str]:
        return refusals(needs)

    @staticmethod
    def token_range(needs: AddNormGatedLinearNeeds) -> tuple[int, int | None]:
        return 1, most_rows(needs.linear, needs.dtype)

    @staticmethod
    def bind(needs: AddNormGatedLinearNeeds, tensors: AddNormGatedLinearTensors) -> AddNormGatedLinear:
        return bind_add_norm_gated_linear(needs, tensors)


class GemvLinear:
    """x @ weight.T + bias: `linear_kernel`."""

    handles = HANDLES

    @staticmethod
    def unsupported(needs: LinearNeeds) -> list[str]:
        return refusals(needs)

    @staticmethod
    def token_range(needs: LinearNeeds) -> tuple[int, int | None]:
        return 1, most_rows(needs.linear, needs.dtype)

    @staticmethod
    def bind(needs: LinearNeeds, tensors: LinearTensors) -> Linear:
        return bind_linear(needs, tensors)


def bind_add_norm_linear(
    needs: AddNormLinearNeeds, tensors: AddNormLinearTensors
) -> Callable[..., tuple[Tensor, Tensor]]:
    """`AddNormLinear`; what else it is called with goes to the kernel."""
    op, out_features = _AddNorm(needs.norm, needs.post_norm, tensors), needs.linear.out_features
    tiles = tiles_by_rows(out_features, needs.linear.in_features, op.weight.element_size())

    def call(hidden: Tensor, residual: Tensor | None, **options: Any) -> tuple[Tensor, Tensor]:
        return op.launch(add_norm_linear_kernel, hidden, residual, out_features, tiles[hidden.shape[0]], **options)

    return call


def bind_add_norm_gated_linear(
    needs: AddNormGatedLinearNeeds, tensors: AddNormGatedLinearTensors
) -> Callable[..., tuple[Tensor, Tensor]]:
    """`AddNormGatedLinear`; what else it is called with goes to the kernel."""
    op = _AddNorm(needs.norm, needs.post_norm, tensors)
    width, activation = needs.linear.out_features // 2, needs.activation
    tiles = tiles_by_rows(width, needs.linear.in_features, op.weight.element_size(), num_matrices=2)

    def call(hidden: Tensor, residual: Tensor | None, **options: Any) -> tuple[Tensor, Tensor]:
        tile = tiles[hidden.shape[0]]
        return op.launch(
            add_norm_gated_linear_kernel, hidden, residual, width, tile, 2, ACTIVATION=activation, **options
        )

    return call


def bind_linear(needs: LinearNeeds, tensors: LinearTensors) -> Callable[..., Tensor]:
    """`Linear`; what else it is called with goes to the kernel."""
    weight, bias = tensors.linear.tensors["weight"], tensors.linear.bias
    out_features, in_features = needs.linear.out_features, needs.linear.in_features
    pdl = has_pdl(weight.device)
    tiles = tiles_by_rows(out_features, in_features, weight.element_size())
    flags = {
        "HAS_BIAS": bias is not None, "N": out_features, "K": in_features, "PDL": pdl, **launch_options(pdl)
    }  # fmt: skip

    def call(x: Tensor, low_rows: int = 0, **options: Any) -> Tensor:
        x = inner_contiguous(x)
        num_tokens = x.shape[0]
        tile = tiles[num_tokens]
        out = torch.empty((num_tokens, out_features), dtype=x.dtype, device=x.device)
        low_programs = triton.cdiv(low_rows, tile.R)
        launch(
            linear_kernel, (low_programs + triton.cdiv(out_features, tile.R),),
            x, weight, bias, out, num_tokens, x.stride(0), M=padded_rows(num_tokens),
            X_AHEAD=min(tile.NUM, 3) if tile.DOT else tile.AHEAD, LOW_PROGRAMS=low_programs, **tile.options, **flags, **options,
        )  # fmt: skip
        return out

    return call


def tiles_by_rows(out_features: int, in_features: int, element_size: int, num_matrices: int = 1) -> dict[int, Tile]:
    """Return the tiles by number of rows."""
    return {
        rows: choose_tile(out_features, in_features, padded_rows(rows), element_size, num_matrices)
        for rows in range(1, MAX_ROWS + 1)
    }
