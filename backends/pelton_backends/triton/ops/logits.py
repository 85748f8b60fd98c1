"""The end of the model: the rows that sample are gathered, added, normed and multiplied by the vocabulary's matrix.

A few rows take one matrix-vector kernel (`gemv_kernels.add_norm_logits_kernel`), more take one kernel for the rows and
torch's matmul (cuBLAS), or on Hopper a product that finds each row's best token too (`linear/hopper_vocab.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from pelton.ops.interface import AddNormLogits, AddNormLogitsNeeds, AddNormLogitsTensors
from pelton.platform.compiling import launch
from pelton.sampling.tails import only_best
from pelton_backends.triton.ops.linear.gemv import DTYPES, HANDLES, inner_contiguous, padded_rows, tiles_by_rows
from pelton_backends.triton.ops.linear.gemv_kernels import (
    add_norm_logits_kernel,
    added,
    load_rows,
    normed_rows,
    store_rows,
)
from pelton_backends.triton.ops.linear.hopper_vocab import VocabProduct, most_vocab_rows
from pelton_backends.triton.ops.linear.large_batch import bind_add_norm
from pelton_backends.triton.ops.linear.refusals import logits_refusals
from pelton_backends.triton.ops.pieces import empty_rows
from pelton_backends.triton.ops.sampling.best import NO_KEY, leave_best
from pelton_backends.triton.runtime import has_pdl, launch_options, let_next_start, wait_for_inputs

if TYPE_CHECKING:
    from torch import Tensor


@triton.jit
def gather_add_norm_kernel(
    hidden, residual, index, norm, post_norm, out, best, eps, post_eps, hidden_stride, residual_stride,
    HAS_RESIDUAL: tl.constexpr, HAS_POST: tl.constexpr, UNIT_OFFSET: tl.constexpr, POST_UNIT_OFFSET: tl.constexpr,
    K: tl.constexpr, BLOCK: tl.constexpr, NO_KEY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64)
    one = tl.zeros([1, 1], tl.int32)
    norm_pieces = load_rows(norm + one, K, BLOCK, 1)
    post_pieces = norm_pieces
    if HAS_POST:
        post_pieces = load_rows(post_norm + one, K, BLOCK, 1)
    let_next_start(PDL)
    wait_for_inputs(PDL)
    if best is not None:
        tl.store(best + i, NO_KEY)
    row = tl.load(index + i) + one
    x = load_rows(hidden + row * hidden_stride, K, BLOCK, 1)
    if HAS_POST:
        x = normed_rows(x, post_pieces, post_eps, POST_UNIT_OFFSET, K, 1)
    if HAS_RESIDUAL:
        x = added(x, load_rows(residual + row * residual_stride, K, BLOCK, 1), 1)
    x = normed_rows(x, norm_pieces, eps, UNIT_OFFSET, K, 1)
    store_rows(out + i * K, x, 1, K, 1, BLOCK, 1)


@triton.jit
def gather_kernel(
    hidden, residual, index, out, residual_out, best, hidden_stride, residual_stride, K: tl.constexpr, BLOCK: tl.constexpr,
    NO_KEY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rows of hidden, and of residual where there is one; best [n]: gets NO_KEY."""
    i = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    let_next_start(PDL)
    wait_for_inputs(PDL)
    tl.store(best + i, NO_KEY)
    row = tl.load(index + i)
    tl.store(out + i * K + column, tl.load(hidden + row * hidden_stride + column, column < K), column < K)
    if residual is not None:
        found = tl.load(residual + row * residual_stride + column, column < K)
        tl.store(residual_out + i * K + column, found, column < K)


class RowNorms:
    """The norms of one bound head, and the arguments that do not change."""

    def __init__(self, needs: AddNormLogitsNeeds, tensors: AddNormLogitsTensors) -> None:
        post = needs.post_norm
        self.norm, self.post_norm = tensors.norm, tensors.post_norm
        self.eps, self.post_eps = needs.norm.eps, 0.0 if post is None else post.eps
        self.hidden_size, self.soft_cap = needs.norm.size, needs.soft_cap
        self.vocab_size = min(needs.vocab_size, needs.linear.out_features)
        self.pdl = has_pdl(tensors.norm.device)
        self.norms = {
            "HAS_POST": post is not None, "UNIT_OFFSET": needs.norm.unit_offset,
            "POST_UNIT_OFFSET": post is not None and post.unit_offset, "K": needs.norm.size,
        }  # fmt: skip
        self.flags = {**self.norms, "PDL": self.pdl, **launch_options(self.pdl)}

    def normed(self, hidden: Tensor, residual: Tensor | None, rows: Tensor, best: Tensor | None = None) -> Tensor:
        """Gather these rows, add and norm them. best [n] int64: gets `NO_KEY`."""
        normed = empty_rows(rows.shape[0], self.hidden_size, hidden)
        block = triton.next_power_of_2(self.hidden_size)
        launch(
            gather_add_norm_kernel, (rows.shape[0],),
            hidden, residual, rows, self.norm, self.post_norm, normed, best, self.eps, self.post_eps,
            hidden.stride(0), 0 if residual is None else residual.stride(0), HAS_RESIDUAL=residual is not None,
            BLOCK=block, NO_KEY=NO_KEY, num_warps=min(max(block // 512, 1), 16), **self.flags,
        )  # fmt: skip
        return normed


class _Head(RowNorms):
    """One bound head: its tensors beside them."""

    def __init__(self, needs: AddNormLogitsNeeds, tensors: AddNormLogitsTensors) -> None:
        super().__init__(needs, tensors)
        self.weight, self.bias = tensors.linear.tensors["weight"], tensors.linear.bias
        self.tiles = tiles_by_rows(self.vocab_size, needs.linear.in_features, self.weight.element_size())
        # Each program norms all rows. On an H200, 151,936 x 1,024: 69 us with one row, 73 us with four, 101 us with eight,
        # cuBLAS 81 us with 32; 128,256 x 4,096: 227 us with one row, 268 us with two, 311 us with four.
        self.few_rows = 4 if needs.norm.size <= 2048 and needs.dtype != "float32" else 1
        # A kernel that starts on multiprocessors which another still fills with its buffers keeps, to its end, the little that those
        # leave of L1. Behind Llama-3.1-8B's down in e4m3 this one takes 335 us so, and 232 us where it waits (H200).
        early = self.pdl and needs.norm.size <= 2048
        self.few_flags = {**self.norms, "PDL": early, **launch_options(early)}
        self.vocab_rows = most_vocab_rows(self.weight) if self.bias is None and self.soft_cap is None else 0
        # 151,936 x 1,024 and the greedy tokens take 88 us with that kernel at 4 rows; with this one up to 8 rows take 72. A step of one row
        # takes as long with either, and one launch less with that one.
        self.prefers_best = self.vocab_rows > 0 and self.hidden_size <= 2048
        if self.vocab_rows:
            self.best = torch.full((self.vocab_rows,), NO_KEY, dtype=torch.int64, device=self.weight.device)
            self.vocab = VocabProduct(self.weight[: self.vocab_size])

    def few(self, hidden: Tensor, residual: Tensor | None, rows: Tensor) -> Tensor:
        """Logits of up to `few_rows` rows."""
        num_rows = rows.shape[0]
        tile = self.tiles[num_rows]
        logits = torch.empty((num_rows, self.vocab_size), dtype=torch.float32, device=hidden.device)
        launch(
            add_norm_logits_kernel, (triton.cdiv(self.vocab_size, tile.R),),
            hidden, residual, rows, self.norm, self.post_norm, self.weight, self.bias, logits, self.eps, self.post_eps,
            num_rows, hidden.stride(0), 0 if residual is None else residual.stride(0), float(self.soft_cap or 0.0),
            HAS_RESIDUAL=residual is not None, HAS_BIAS=self.bias is not None, HAS_CAP=self.soft_cap is not None,
            N=self.vocab_size, M=padded_rows(num_rows), **tile.options, **self.few_flags,
        )  # fmt: skip
        return logits

    def many(self, hidden: Tensor, residual: Tensor | None, rows: Tensor) -> Tensor:
        """Logits of any number of rows."""
        if rows.shape[0] <= self.vocab_rows and (self.hidden_size <= 2048 or only_best.get()):
            best = self.best[: rows.shape[0]]
            normed = self.normed(hidden, residual, rows, best)
            return leave_best(self.vocab(normed, best, is_written=not only_best.get()), best)
        logits = _float32_product(self.normed(hidden, residual, rows), self.weight[: self.vocab_size])
        if self.bias is not None:
            logits += self.bias[: self.vocab_size].float()
        return capped(logits, self.soft_cap)


class _ShareOfHead:
    """One of several ranks' part of the vocabulary: rows are summed over ranks when they are normed, logits gathered behind the product.
    Where nothing is gathered, since the best tokens alone are asked for, these stay with the logits."""

    def __init__(self, needs: AddNormLogitsNeeds, tensors: AddNormLogitsTensors) -> None:
        self.norm, self.gather = bind_add_norm(needs, tensors), tensors.gather
        self.vocab_size, self.soft_cap = needs.vocab_size, needs.soft_cap
        self.weight, self.bias = tensors.linear.tensors["weight"], tensors.linear.bias
        self.pdl = has_pdl(self.weight.device)
        is_bare = self.bias is None and self.soft_cap is None
        is_whole = (
            self.vocab_size == len(self.weight) * needs.tp_size
        )  # else the last ranks have rows that are no tokens
        self.vocab_rows = most_vocab_rows(self.weight) if is_bare and is_whole else 0
        self.best = torch.empty(max(self.vocab_rows, 1), dtype=torch.int64, device=self.weight.device)
        self.vocab = VocabProduct(self.weight) if self.vocab_rows else None

    def rows(self, hidden: Tensor, residual: Tensor | None, index: Tensor, best: Tensor) -> Tensor:
        """-> normed rows of all ranks. best: gets `NO_KEY`."""
        num_rows, size = len(index), hidden.shape[1]
        found = empty_rows(num_rows, size, hidden)
        found_residual = None if residual is None else empty_rows(num_rows, size, hidden)
        block = triton.next_power_of_2(size)
        launch(
            gather_kernel, (num_rows,),
            hidden, residual, index, found, found_residual, best, hidden.stride(0), 0 if residual is None else residual.stride(0),
            K=size, BLOCK=block, NO_KEY=NO_KEY, PDL=self.pdl, num_warps=min(max(block // 512, 1), 16), **launch_options(self.pdl),
        )  # fmt: skip
        return self.norm(found, found_residual)[0]

    def __call__(self, hidden: Tensor, residual: Tensor | None, index: Tensor) -> Tensor:
        num_rows, is_best = len(index), only_best.get()
        if self.vocab is not None and is_best and 0 < num_rows <= self.vocab_rows:
            best = self.best[:num_rows]
            logits = leave_best(self.vocab(self.rows(hidden, residual, index, best), best, is_written=False), best)
        elif num_rows:
            spare = torch.empty(num_rows, dtype=torch.int64, device=hidden.device)
            logits = _float32_product(self.rows(hidden, residual, index, spare), self.weight)
        else:
            logits = torch.empty((0, len(self.weight)), dtype=torch.float32, device=hidden.device)
        if self.bias is not None:
            logits += self.bias.float()
        if self.gather is not None:
            logits = self.gather(logits)
        if logits.shape[1] > self.vocab_size:
            logits = logits[:, : self.vocab_size]
        return capped(logits, self.soft_cap)


def capped(logits: Tensor, soft_cap: float | None) -> Tensor:
    return logits if soft_cap is None else logits.div_(soft_cap).tanh_().mul_(soft_cap)


def _float32_product(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T, not rounded to their dtype where torch can leave it in float32."""
    if x.dtype != torch.float32 and x.is_cuda:
        return torch.mm(x, weight.T, out_dtype=torch.float32)
    return torch.mm(x, weight.T).float()


class TritonAddNormLogits:
    """See `AddNormLogits`. The products are float32, where the reference rounds them to the model's dtype first."""

    handles = HANDLES | {"soft_cap"}

    @staticmethod
    def unsupported(needs: AddNormLogitsNeeds) -> list[str]:
        return logits_refusals(needs, ("plain",), DTYPES, sums_over_ranks=True)

    @staticmethod
    def bind(needs: AddNormLogitsNeeds, tensors: AddNormLogitsTensors) -> AddNormLogits:
        if needs.tp_size > 1:
            return _bind_share(needs, tensors)
        head = _Head(needs, tensors)

        def call(hidden: Tensor, residual: Tensor | None, rows: Tensor) -> Tensor:
            if rows.shape[0] == 0:
                return torch.empty((0, head.vocab_size), dtype=torch.float32, device=hidden.device)
            hidden = inner_contiguous(hidden)
            residual = None if residual is None else inner_contiguous(residual)
            num_rows = rows.shape[0]
            is_few = num_rows <= head.few_rows and not (num_rows > 1 and head.prefers_best and only_best.get())
            return (head.few if is_few else head.many)(hidden, residual, rows)

        return call


def _bind_share(needs: AddNormLogitsNeeds, tensors: AddNormLogitsTensors) -> AddNormLogits:
    share = _ShareOfHead(needs, tensors)

    def call(hidden: Tensor, residual: Tensor | None, rows: Tensor) -> Tensor:
        return share(inner_contiguous(hidden), None if residual is None else inner_contiguous(residual), rows)

    return call
