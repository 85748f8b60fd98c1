"""Norms and activations fused into one pass over the rows, the product torch's matmul (cuBLAS) or, of many rows, `hopper_matmul`.

These serve every batch size; `gemv` and `small_batch` come before them for few rows.

A product costs as many kernels as it has stages: rows in (add, norms), the product, rows out (activation). The two around
it are bound by memory: each number is read and written once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
import triton
import triton.language as tl

from pelton.ops.interface import (
    AddNorm,
    AddNormGatedLinear,
    AddNormGatedLinearNeeds,
    AddNormGatedLinearTensors,
    AddNormLinear,
    AddNormLinearNeeds,
    AddNormLinearTensors,
    AddNormNeeds,
    AllReduce,
    Gated,
    GatedNeeds,
    GatedTensors,
    Linear,
    LinearNeeds,
    LinearTensors,
    LinearWeights,
    NormSpec,
)
from pelton_backends.triton.launch import Launcher, alignment
from pelton_backends.triton.ops.linear.cublaslt import LibraryProduct
from pelton_backends.triton.ops.linear.gemv import DTYPES, HANDLES, most_rows
from pelton_backends.triton.ops.linear.hopper_matmul import can_multiply_many, halves_of, hopper_matmul, share_of_work
from pelton_backends.triton.ops.linear.refusals import product_refusals, row_refusals
from pelton_backends.triton.ops.moe.unsummed import UnsummedRows, sum_add_norm_rows
from pelton_backends.triton.ops.pieces import activated, empty_rows, kept_policy, normed
from pelton_backends.triton.runtime import has_pdl, launch_options, let_next_start, num_sms, wait_for_inputs

if TYPE_CHECKING:
    from torch import Tensor

# `hopper_matmul` is faster than cuBLAS, with an activation than cuBLAS and `gated`, where its tiles keep the multiprocessors
# busy (`share_of_work`): see there.
MIN_ROWS = 1024
MIN_SHARE = 0.9
MIN_GATED_SHARE = 0.85
MIN_SENT_SHARE = 0.75  # where results go to another rank on the way, which cuBLAS's do not


@triton.jit
def add_norm_row(
    hidden_ptr, residual_ptr, sum_ptr, norm_ptr, post_norm_ptr, row, hidden_stride, residual_stride, sum_stride, eps, post_eps,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, UNIT_OFFSET: tl.constexpr, POST_UNIT_OFFSET: tl.constexpr,
    PDL: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """The normed row, zeros behind it. residual_ptr, post_norm_ptr may be None; sum_ptr None: the sum is not stored. KEPT: an eviction
    policy for it."""
    columns = tl.arange(0, BLOCK)
    mask = columns < SIZE
    dtype = hidden_ptr.dtype.element_ty
    norm = tl.load(norm_ptr + columns, mask=mask, other=0.0)
    if post_norm_ptr is not None:
        post_norm = tl.load(post_norm_ptr + columns, mask=mask, other=0.0)
    let_next_start(PDL)
    wait_for_inputs(PDL)
    hidden = hidden_ptr + row * hidden_stride + columns
    x = tl.load(hidden, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + row * residual_stride + columns, mask=mask, other=0.0).to(tl.float32)
    if post_norm_ptr is not None:
        inverse_rms = 1.0 / tl.sqrt_rn(tl.sum(x * x) / SIZE + post_eps)
        x = normed(x, inverse_rms, post_norm, POST_UNIT_OFFSET, dtype).to(tl.float32)
    if residual_ptr is not None:
        x = (x + residual).to(dtype).to(tl.float32)
    if sum_ptr is not None:
        tl.store(sum_ptr + row * sum_stride + columns, x.to(dtype), mask=mask, eviction_policy=KEPT)
    inverse_rms = 1.0 / tl.sqrt_rn(tl.sum(x * x) / SIZE + eps)
    return normed(x, inverse_rms, norm, UNIT_OFFSET, dtype)


@triton.jit
def _add_norm_kernel(
    hidden_ptr, residual_ptr, sum_ptr, normed_ptr, norm_ptr, post_norm_ptr,
    hidden_stride, residual_stride, sum_stride, eps, post_eps,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, UNIT_OFFSET: tl.constexpr, POST_UNIT_OFFSET: tl.constexpr,
    PDL: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """One row a program."""
    # The product before has written the last rows last, and the one behind begins with the first: those are still in L2.
    row = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64)
    result = add_norm_row(
        hidden_ptr, residual_ptr, sum_ptr, norm_ptr, post_norm_ptr, row, hidden_stride, residual_stride, sum_stride,
        eps, post_eps, SIZE, BLOCK, UNIT_OFFSET, POST_UNIT_OFFSET, PDL, KEPT,
    )  # fmt: skip
    columns = tl.arange(0, BLOCK)
    tl.store(normed_ptr + row * SIZE + columns, result, mask=columns < SIZE, eviction_policy=KEPT)


_launch_add_norm = Launcher(_add_norm_kernel)


def add_norm(
    hidden: Tensor | UnsummedRows,
    residual: Tensor | None,
    norm: Tensor,
    norm_spec: NormSpec,
    post_norm: Tensor | None = None,
    post_spec: NormSpec | None = None,
) -> tuple[Tensor, Tensor]:
    """The new residual, and its normed rows.

    Math   residual' = post_norm(hidden) + residual;  normed = residual' / sqrt(mean(residual'^2) + eps) * norm
           (norm + 1 and post_norm + 1 where the spec has `unit_offset`)
    Paper  Zhang and Sennrich, Root Mean Square Layer Normalization, NeurIPS 2019 (arXiv:1910.07467)

    hidden, residual [T, H] fp16, bf16 or fp32; strides (any, 1); residual None counts as zeros. Or hidden is of experts that are to be
    added up, with a residual and without post_norm
    norm, post_norm  [H], contiguous; post_norm None leaves hidden as it is
    -> residual' [T, H], in residual's memory (or hidden's, without a residual); normed [T, H] contiguous

    Sums of squares in float32; post-normed rows, residual' and normed rows are rounded to the dtype as in
    `pelton.ops.reference`. One row a program; eight numbers a thread, which is one 16-byte load of two-byte dtypes.
    """
    if isinstance(hidden, UnsummedRows):
        assert residual is not None and post_norm is None
        return residual, sum_add_norm_rows(hidden, residual, norm, norm_spec)
    num_rows, size = hidden.shape
    normed_rows = empty_rows(num_rows, size, hidden)
    total = hidden if residual is None else residual
    if num_rows == 0:
        return total, normed_rows
    is_stored = residual is not None or post_norm is not None
    block = triton.next_power_of_2(size)
    pdl = has_pdl(hidden.device)
    residual_stride = 0 if residual is None else residual.stride(0)
    kept = kept_policy(num_rows)
    key = (
        kept, hidden.dtype, hidden.device, norm_spec, post_spec, residual is None, hidden.stride(0), residual_stride,
        alignment(hidden, residual, norm, post_norm),
    )  # fmt: skip
    _launch_add_norm(
        key,
        (num_rows,),
        (
            hidden, residual, total if is_stored else None, normed_rows, norm, post_norm,
            hidden.stride(0), residual_stride, total.stride(0),
            norm_spec.eps, 0.0 if post_spec is None else post_spec.eps,
        ),
        {
            "SIZE": size, "BLOCK": block, "UNIT_OFFSET": norm_spec.unit_offset,
            "POST_UNIT_OFFSET": post_spec is not None and post_spec.unit_offset, "PDL": pdl, "KEPT": kept,
        },
        num_warps=min(max(block // 256, 1), 16), **launch_options(pdl),
    )  # fmt: skip
    return total, normed_rows


@triton.jit
def _gated_kernel(
    gate_up_ptr, out_ptr, SIZE: tl.constexpr, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr, PDL: tl.constexpr
):
    """BLOCK columns of one row a program."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < SIZE
    let_next_start(PDL)
    wait_for_inputs(PDL)
    gate = tl.load(gate_up_ptr + row * (2 * SIZE) + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * (2 * SIZE) + SIZE + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * SIZE + columns, activated(gate, up, ACTIVATION, out_ptr.dtype.element_ty), mask=mask)


_launch_gated = Launcher(_gated_kernel)


def gated(gate_up: Tensor, activation: str) -> Tensor:
    """activation(gate) * up.

    gate_up [T, 2 I] fp16, bf16 or fp32, contiguous: gate, then up -> [T, I], contiguous

    The activation is computed in float32, rounded to the dtype, multiplied and rounded, as torch does. GELU is exact
    (erf) or, as "gelu_tanh", Hendrycks and Gimpel's approximation (arXiv:1606.08415). Two 16-byte loads of gate and of up
    a thread: 71 us on an H200 for 16,384 x 3,072 (4.25 TB/s); blocks of 512 took 120 us.
    """
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = empty_rows(num_rows, size, gate_up)
    if num_rows == 0:
        return out
    block = min(triton.next_power_of_2(size), 4096)
    pdl = has_pdl(gate_up.device)
    _launch_gated(
        (gate_up.dtype, gate_up.device, size, activation, alignment(gate_up)),
        (num_rows, triton.cdiv(size, block)),
        (gate_up, out),
        {"SIZE": size, "BLOCK": block, "ACTIVATION": activation, "PDL": pdl},
        num_warps=max(block // 512, 1), **launch_options(pdl),
    )  # fmt: skip
    return out


def refusals(needs: Any) -> list[str]:
    return product_refusals(needs, ("plain",), DTYPES)


def is_for_tiles(weights: LinearWeights, activation: str | None) -> Callable[..., bool]:
    """Return what says of rows, and of whether they are sent as they come, whether `hopper_matmul` is to multiply them."""
    weight = weights.tensors["weight"]
    if weights.bias is not None or not can_multiply_many(weight):
        return lambda x, is_sent=False: False
    programs, min_share = num_sms(weight.device), MIN_SHARE if activation is None else MIN_GATED_SHARE

    def is_for_them(x: Tensor, is_sent: bool = False) -> bool:
        num_rows = x.shape[0]
        if num_rows < MIN_ROWS or x.stride(0) % 8 or x.data_ptr() % 16:
            return False
        share = share_of_work(num_rows, *weight.shape, programs, activation)
        return share >= (MIN_SENT_SHARE if is_sent else min_share)

    return is_for_them


def product_of(weights: LinearWeights, activation: str | None = None, reduce: AllReduce | None = None) -> Linear:
    """x [T, K] -> x @ weight.T + bias, or activation(gate) * up of its halves. reduce: as in `LinearTensors`."""
    weight, bias = weights.tensors["weight"], weights.bias
    library = LibraryProduct(weight)

    def by_cublas(x: Tensor) -> Tensor:
        rows = library(x) if bias is None else F.linear(x, weight, bias)
        return rows if activation is None else gated(rows, activation)

    takes = is_for_tiles(weights, activation)
    arrived = halves_of(weight.device) if can_multiply_many(weight) else None
    to_send = getattr(reduce, "to_send", None)  # see `AllReduce`
    if to_send is not None:
        reduce.open_to_send()  # type: ignore[union-attr]

    def product(x: Tensor) -> Tensor:
        sent = None if to_send is None or x.shape[0] < MIN_ROWS else to_send(x.shape[0])
        if takes(x, sent is not None):
            return hopper_matmul(x, weight, activation, sent, arrived=arrived)
        return by_cublas(x)

    return product


def bind_add_norm(needs: AddNormNeeds, tensors: Any) -> AddNorm:
    """tensors: norm, post_norm and reduce, as `AddNormTensors` has them."""
    norms = (tensors.norm, needs.norm, tensors.post_norm, needs.post_norm)
    reduce = tensors.reduce
    sum_add_norm = getattr(reduce, "add_norm", None)  # see `AllReduce`

    def call(hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        if sum_add_norm is not None:
            found: tuple[Tensor, Tensor] | None = sum_add_norm(hidden, residual, *norms)
            if found is not None:
                return found
        if reduce is not None:
            hidden = reduce(hidden)
        residual, rows = add_norm(hidden, residual, *norms)
        return rows, residual

    return call


def takes_unsummed(needs: AddNormNeeds) -> bool:
    """Return whether an op behind this norm can be given `UnsummedRows`: sums of experts alone, which nothing norms first."""
    return needs.tp_size == 1 and needs.post_norm is None


class TritonAddNorm:
    handles = frozenset(["post_norm", "tp_size", "unit_offset"])

    @staticmethod
    def unsupported(needs: AddNormNeeds) -> list[str]:
        return row_refusals(needs, DTYPES)

    bind = staticmethod(bind_add_norm)


class TritonGated:
    @staticmethod
    def unsupported(needs: GatedNeeds) -> list[str]:
        return row_refusals(needs, DTYPES)

    @staticmethod
    def bind(needs: GatedNeeds, tensors: GatedTensors) -> Gated:
        activation = needs.activation

        def call(gate_up: Tensor) -> Tensor:
            return gated(gate_up.contiguous(), activation)

        return call


class LargeBatchLinear:
    handles = HANDLES

    @staticmethod
    def unsupported(needs: LinearNeeds) -> list[str]:
        return refusals(needs)

    @staticmethod
    def bind(needs: LinearNeeds, tensors: LinearTensors) -> Linear:
        return product_of(tensors.linear, reduce=tensors.reduce)


class LargeBatchAddNormLinear:
    handles = HANDLES

    @staticmethod
    def unsupported(needs: AddNormLinearNeeds) -> list[str]:
        return refusals(needs)

    @staticmethod
    def bind(needs: AddNormLinearNeeds, tensors: AddNormLinearTensors) -> AddNormLinear:
        norm, product = bind_add_norm(needs, tensors), product_of(tensors.linear)

        def add_norm_linear(hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
            rows, residual = norm(hidden, residual)
            return product(rows), residual

        add_norm_linear.takes_unsummed = takes_unsummed(needs)  # type: ignore[attr-defined]
        return add_norm_linear


class LargeBatchAddNormGatedLinear:
    handles = HANDLES

    @staticmethod
    def unsupported(needs: AddNormGatedLinearNeeds) -> list[str]:
        return product_refusals(needs, ("plain",), DTYPES, sums_over_ranks=True)

    @staticmethod
    def token_range(needs: AddNormGatedLinearNeeds) -> tuple[int, int | None]:
        """With several ranks, whose few rows `linear` and `gated` serve."""
        return (0 if needs.tp_size == 1 else most_rows(needs.linear, needs.dtype) + 1), None

    @staticmethod
    def bind(needs: AddNormGatedLinearNeeds, tensors: AddNormGatedLinearTensors) -> AddNormGatedLinear:
        norm, product = bind_add_norm(needs, tensors), product_of(tensors.linear, needs.activation)

        def add_norm_gated_linear(hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
            rows, residual = norm(hidden, residual)
            return product(rows), residual

        return add_norm_gated_linear
