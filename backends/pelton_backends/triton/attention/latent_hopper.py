"""Attention of many query heads over one paged head of latents, for Hopper, in Gluon: four warps copy, two warp groups compute.

Both products have the latents on the left, keys by heads and numbers by heads, so that the tensor cores' 64 rows are all used however
few heads there are, and a tile of latents is read from shared memory by both. The two groups take tiles in turn, each with maxima and
sums of its own: what they leave are parts of the token's result, as those of other programs are, which `merge_kernel` brings together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from pelton_backends.triton.attention.latent import LOG2_E, merge_parts, splits_to_fill
from pelton_backends.triton.launch import Launcher, alignment
from pelton_backends.triton.ops.pieces import is_hopper
from pelton_backends.triton.runtime import has_pdl, launch_options, num_sms

if TYPE_CHECKING:
    from torch import Tensor

LATENT, ROPE = 512, 64
"""Numbers of a latent, and of its key's rotated part: DeepSeek's, and the only ones."""
PAGE = 16  # tokens a copy; blocks are multiples of it
KEYS = 64  # of a tile: the rows of one product
GROUPS = 2
MOST_ROWS = 8192 * 32  # tokens times heads of a step: each leaves `GROUPS` parts of 2 KiB to be merged
_LATENT, _ROPE, _PAGE, _KEYS = gl.constexpr(LATENT), gl.constexpr(ROPE), gl.constexpr(PAGE), gl.constexpr(KEYS)
_GROUPS, _PAGES, _PANELS = gl.constexpr(GROUPS), gl.constexpr(KEYS // PAGE), gl.constexpr(LATENT // 64)
_PAGE_BYTES = gl.constexpr(PAGE * (LATENT + ROPE) * 2)


@gluon.jit
def _copy(
    PART: gl.constexpr, pages, latents, turned, ready, free, table, first_tile, num_tiles, last_page, block_rows,
    BLOCK_SIZE: gl.constexpr,
):  # fmt: skip
    """A copying warp: one page of each tile to the group whose turn it is, as soon as that is done with its last one. One warp for all of
    them takes longer to say what is to be copied than a tile takes to arrive."""
    for i in range(num_tiles):
        group, phase = i % _GROUPS, (i // _GROUPS) & 1
        page = gl.minimum((first_tile + i) * _PAGES + PART, last_page)
        # The table's entry first: its way from memory passes while the memory is still in use.
        row = gl.load(table + page * _PAGE // BLOCK_SIZE) * block_rows + page * _PAGE % BLOCK_SIZE
        mbarrier.wait(free.index(group), phase ^ 1)
        barrier = ready.index(group)
        mbarrier.expect(barrier, _PAGE_BYTES)
        for panel in gl.static_range(_PANELS):
            place = latents.index((group * _PANELS + panel) * _PAGES + PART)
            tma.async_copy_global_to_shared(pages, [row, panel * 64], barrier, place)
        tma.async_copy_global_to_shared(pages, [row, _LATENT], barrier, turned.index(group * _PAGES + PART))


@gluon.jit
def _keep_rows(tile, end):
    """Zeros in a tile's rows from `end` on: what lies behind the context may be NaN, which a weight of 0 would not silence."""
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row = gl.arange(0, _PAGE, layout=gl.SliceLayout(1, COPY))
    for start in gl.static_range(0, _KEYS, _PAGE):
        part = tile.slice(start, _PAGE)
        values = part.load(COPY)
        part.store(gl.where(gl.expand_dims(start + row < end, 1), values, gl.zeros_like(values)))
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def _attend(
    GROUP: gl.constexpr, latents, turned, q_latent, q_turned, weights_smem, ready, free, sums, stats, first_key, last_key,
    num_tiles, first_head, token, split, splits, num_heads, factor, HEADS: gl.constexpr,
):  # fmt: skip
    """A computing warp group: every second tile."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEADS, 16])
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    dtype: gl.constexpr = q_latent.dtype
    keys = latents._reinterpret(dtype, [_GROUPS, _KEYS, _LATENT], TILE).index(GROUP)
    turned_keys = turned._reinterpret(dtype, [_GROUPS, _KEYS, _ROPE], TILE).index(GROUP)
    local = gl.arange(0, _KEYS, layout=gl.SliceLayout(1, LAYOUT))
    top = gl.full([HEADS], -float("inf"), gl.float32, gl.SliceLayout(0, LAYOUT))
    total = gl.zeros([HEADS], gl.float32, gl.SliceLayout(0, LAYOUT))
    found = gl.zeros([_LATENT, HEADS], gl.float32, LAYOUT)
    for i in range(GROUP, num_tiles, _GROUPS):
        mbarrier.wait(ready.index(GROUP), (i // _GROUPS) & 1)
        first = first_key + i * _KEYS
        if first + _KEYS > last_key:
            _keep_rows(keys, last_key - first)
        nothing = gl.zeros([_KEYS, HEADS], gl.float32, LAYOUT)
        scores = warpgroup_mma(turned_keys, q_turned.permute((1, 0)), nothing, use_acc=False, is_async=True)
        scores = warpgroup_mma(keys, q_latent.permute((1, 0)), scores, is_async=True)
        scores = warpgroup_mma_wait(0, [scores])
        scores = gl.where(gl.expand_dims(first + local < last_key, 1), scores * factor, -float("inf"))
        now_top = gl.maximum(top, gl.max(scores, 0))
        weights = gl.exp2(scores - gl.expand_dims(now_top, 0))
        shrink = gl.exp2(top - now_top)
        total = total * shrink + gl.sum(weights, 0)
        top = now_top
        weights_smem.store(gl.permute(weights.to(dtype), (1, 0)))
        fence_async_shared()
        gl.thread_barrier()
        found = found * gl.expand_dims(shrink, 0)
        found = warpgroup_mma(keys.permute((1, 0)), weights_smem.permute((1, 0)), found, is_async=True)
        found = warpgroup_mma_wait(0, [found])
        gl.thread_barrier()
        mbarrier.arrive(free.index(GROUP), count=1)
    head = first_head + gl.arange(0, HEADS, layout=gl.SliceLayout(0, LAYOUT))
    part = (token.to(gl.int64) * num_heads + head) * (splits * _GROUPS) + split * _GROUPS + GROUP
    dim = gl.arange(0, _LATENT, layout=gl.SliceLayout(1, LAYOUT))
    is_head = head < num_heads
    gl.store(sums + gl.expand_dims(part * _LATENT, 0) + gl.expand_dims(dim, 1), found, gl.expand_dims(is_head, 0))
    gl.store(stats + part * 2, top, is_head)
    gl.store(stats + part * 2 + 1, total, is_head)


@gluon.jit
def _query_to(smem, query, first_head, num_heads, first: gl.constexpr, WIDTH: gl.constexpr, HEADS: gl.constexpr):
    """Numbers first .. first + WIDTH - 1 of the heads' queries."""
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    head = first_head + gl.arange(0, HEADS, layout=gl.SliceLayout(1, COPY))
    dim = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, COPY))
    at = gl.expand_dims(head * (_LATENT + _ROPE), 1) + gl.expand_dims(first + dim, 0)
    smem.store(gl.load(query + at, gl.expand_dims(head < num_heads, 1) & (gl.expand_dims(dim, 0) < WIDTH), 0.0))


@gluon.jit(do_not_specialize=["num_reqs", "stride_table", "splits", "searches"])
def hopper_latent_kernel(
    query, pages, sums, stats, query_start_loc, seq_lens, block_table, num_reqs, stride_query, stride_table, block_rows,
    num_heads, splits, searches, factor, BLOCK_SIZE: gl.constexpr, HEADS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """One program for HEADS heads, a token, and a split of the token's context. Rows are found as in `latent_attention_kernel`."""
    if PDL:
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )
        gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    first_head, token, split = gl.program_id(0) * HEADS, gl.program_id(1), gl.program_id(2)
    if token < gl.load(query_start_loc + num_reqs):
        # Rows of one token each: it is the row of its number. Else it is looked for, load after load.
        row = gl.minimum(token, num_reqs - 1)
        start, end = gl.load(query_start_loc + row), gl.load(query_start_loc + row + 1)
        if (start != token) | (end != token + 1):
            low, high = 0, num_reqs
            for _ in range(searches):
                middle = (low + high) // 2
                is_before = gl.load(query_start_loc + gl.minimum(middle, num_reqs)) <= token
                low = gl.where(is_before & (middle < high), middle, low)
                high = gl.where(is_before, high, middle)
            row = low
            start, end = gl.load(query_start_loc + row), gl.load(query_start_loc + row + 1)
        num_keys = gl.load(seq_lens + row) - (end - start) + (token - start) + 1
        tiles = (num_keys + _KEYS - 1) // _KEYS
        share = (tiles + splits - 1) // splits
        first_tile = split * share
        num_tiles = gl.maximum(gl.minimum(tiles - first_tile, share), 0)

        dtype: gl.constexpr = query.dtype.element_ty
        TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
        q_latent = gl.allocate_shared_memory(dtype, [HEADS, _LATENT], TILE)
        q_turned = gl.allocate_shared_memory(dtype, [HEADS, _ROPE], TILE)
        # A tile of NVMMASharedLayout is its 64-column panels one after the other, and 16 rows of a panel lie together: a page
        # goes to where the tile wants it.
        latents = gl.allocate_shared_memory(dtype, [_GROUPS * _PANELS * _PAGES, _PAGE, 64], TILE)
        turned = gl.allocate_shared_memory(dtype, [_GROUPS * _PAGES, _PAGE, 64], TILE)
        weights = gl.allocate_shared_memory(dtype, [_GROUPS, HEADS, _KEYS], TILE)
        ready = gl.allocate_shared_memory(gl.int64, [_GROUPS, 1], mbarrier.MBarrierLayout())
        free = gl.allocate_shared_memory(gl.int64, [_GROUPS, 1], mbarrier.MBarrierLayout())
        for group in gl.static_range(_GROUPS):
            mbarrier.init(ready.index(group), count=_PAGES)
            mbarrier.init(free.index(group), count=1)
        own = query + token.to(gl.int64) * stride_query
        _query_to(q_latent, own, first_head, num_heads, 0, _LATENT, HEADS)
        _query_to(q_turned, own, first_head, num_heads, _LATENT, _ROPE, HEADS)
        fence_async_shared()
        gl.thread_barrier()
        first_key, last_page = first_tile * _KEYS, (num_keys - 1) // _PAGE
        table = block_table + row.to(gl.int64) * stride_table
        gl.warp_specialize(
            [
                (_attend, (
                    gl.constexpr(0), latents, turned, q_latent, q_turned, weights.index(0), ready, free, sums, stats, first_key,
                    num_keys, num_tiles, first_head, token, split, splits, num_heads, factor, HEADS,
                )),
                (_attend, (
                    gl.constexpr(1), latents, turned, q_latent, q_turned, weights.index(1), ready, free, sums, stats, first_key,
                    num_keys, num_tiles, first_head, token, split, splits, num_heads, factor, HEADS,
                )),
                (_copy, (
                    gl.constexpr(0), pages, latents, turned, ready, free, table, first_tile, num_tiles, last_page, block_rows,
                    BLOCK_SIZE,
                )),
                (_copy, (
                    gl.constexpr(1), pages, latents, turned, ready, free, table, first_tile, num_tiles, last_page, block_rows,
                    BLOCK_SIZE,
                )),
                (_copy, (
                    gl.constexpr(2), pages, latents, turned, ready, free, table, first_tile, num_tiles, last_page, block_rows,
                    BLOCK_SIZE,
                )),
                (_copy, (
                    gl.constexpr(3), pages, latents, turned, ready, free, table, first_tile, num_tiles, last_page, block_rows,
                    BLOCK_SIZE,
                )),
            ],
            [4, 1, 1, 1, 1],
            [232, 40, 40, 40, 40],
        )  # fmt: skip


_launch = Launcher(hopper_latent_kernel)


def _page_rows(cache: Tensor) -> tuple[Tensor, int]:
    """The cache [P, S, D] as rows [n, D], and how many of them it is from one block to the next."""
    stride_block, stride_token, _ = cache.stride()
    block_rows = stride_block // stride_token
    num_rows = (cache.shape[0] - 1) * block_rows + cache.shape[1]
    return cache.as_strided((num_rows, cache.shape[2]), (stride_token, 1)), block_rows


class HopperLatent:
    """`latent_attention` over one layer's cache, on Hopper: what follows from the layer is found out once.

    32 rows of 8,000 latents on an H200: 16 heads 85 us (81 % of copy bandwidth); 128 heads 302 us, where the portable kernel takes 925
    and programs of 16 heads 390: bound by products, whose 32 columns use the tensor cores less than the latents' bytes the memory."""

    @staticmethod
    def serves(cache: Tensor, *, latent_dim: int, dtype: torch.dtype) -> bool:
        """Return whether it can."""
        stride_block, stride_token, _ = cache.stride()
        return (
            is_hopper(cache.device) and dtype == cache.dtype and dtype.itemsize == 2
            and (latent_dim, cache.shape[2]) == (LATENT, LATENT + ROPE) and cache.shape[1] % PAGE == 0
            and stride_block % stride_token == stride_token % 8 == cache.data_ptr() % 16 == 0
        )  # fmt: skip

    @staticmethod
    def takes(query: Tensor) -> bool:
        """Return whether the step is small enough for the memory of its parts."""
        return query.shape[0] * query.shape[1] <= MOST_ROWS

    def __init__(self, cache: Tensor, *, num_heads: int, scale: float) -> None:
        self._heads = 16 if num_heads <= 32 else 32
        rows, self._block_rows = _page_rows(cache)
        self._pages = TensorDescriptor.from_tensor(rows, [PAGE, 64], gl.NVMMASharedLayout(128, 16, rank=2))
        self._device, self._dtype, self._factor = cache.device, cache.dtype, scale * LOG2_E
        self._constants: dict[str, Any] = {
            "BLOCK_SIZE": cache.shape[1],
            "HEADS": self._heads,
            "PDL": has_pdl(cache.device),
        }
        self._options = launch_options(self._constants["PDL"])

    def __call__(
        self, query: Tensor, output: Tensor, query_start_loc: Tensor, seq_lens: Tensor, block_table: Tensor, *,
        max_seq_len: int,
    ) -> None:  # fmt: skip
        """Tensors as those of `latent_attention`."""
        num_tokens, num_heads, _ = query.shape
        if num_tokens == 0:
            return
        num_reqs, groups = seq_lens.shape[0], triton.cdiv(num_heads, self._heads)
        splits = splits_to_fill(num_tokens * groups, num_sms(self._device), max_seq_len)
        sums = torch.empty(
            num_tokens, num_heads, GROUPS * splits, LATENT, dtype=torch.float32, device=self._device
        )  # of both warp groups of each split
        stats = torch.empty(num_tokens, num_heads, GROUPS * splits, 2, dtype=torch.float32, device=self._device)
        strides = query.stride(0), block_table.stride(0), self._block_rows, num_heads
        key = (
            self._dtype, self._device, query.stride(0), self._block_rows, num_heads,
            alignment(query, query_start_loc, seq_lens, block_table), *self._constants.values(),
        )  # fmt: skip
        arguments = (
            query, self._pages, sums, stats, query_start_loc, seq_lens, block_table, num_reqs, *strides, splits,
            num_reqs.bit_length() + 1, self._factor,
        )  # fmt: skip
        _launch(key, (groups, num_tokens, splits), arguments, self._constants, num_warps=4, **self._options)
        merge_parts(sums, stats, output, query_start_loc, num_reqs)
