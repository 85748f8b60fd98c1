"""Attention of many query heads over one paged head of latents, for Hopper, in Gluon: four warps copy, two warp groups compute.

Both products have the latents on the left, keys by heads and numbers by heads, so that the tensor cores' 64 rows are all used however
few heads there are, and a tile of latents is read from shared memory by both. The two groups take tiles in turn, each with maxima and
sums of its own, which the first one adds up. Programs that share a context store what they have found, and each brings a part of it
together, once all have: no launch follows.
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
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pelton_backends.triton.attention.latent import LOG2_E, splits_to_fill
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
MOST_ROWS = 16384 * 32  # tokens times heads of a step
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
def _query_to(smem, query, first_head, num_heads, first: gl.constexpr, WIDTH: gl.constexpr, HEADS: gl.constexpr):
    """Numbers first .. first + WIDTH - 1 of the heads' queries."""
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    head = first_head + gl.arange(0, HEADS, layout=gl.SliceLayout(1, COPY))
    dim = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, COPY))
    at = gl.expand_dims(head * (_LATENT + _ROPE), 1) + gl.expand_dims(first + dim, 0)
    smem.store(gl.load(query + at, gl.expand_dims(head < num_heads, 1) & (gl.expand_dims(dim, 0) < WIDTH), 0.0))


@gluon.jit
def _merge(
    sums, stats, output, counter, split, splits, first_head, num_heads, PARTS: gl.constexpr, HEADS: gl.constexpr
):
    """Bring the parts of a context together: each of its programs a share of the numbers, once all have stored theirs.

    counter: 0 before, and when the last of them is done."""
    WIDTH: gl.constexpr = _LATENT // PARTS
    LANES: gl.constexpr = min(WIDTH // 4, 32)
    LAYOUT: gl.constexpr = gl.BlockedLayout([PARTS, 1, 4], [1, 32 // LANES, LANES], [1, 4, 1], [2, 1, 0])
    OF_PARTS: gl.constexpr = gl.SliceLayout(2, LAYOUT)
    gl.thread_barrier()  # all threads' stores come before the one thread's increment, which releases them
    arrived = gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") + 1
    while arrived < splits:
        arrived = gl.atomic_add(counter, 0, sem="acquire", scope="gpu")
    gl.thread_barrier()
    part = gl.expand_dims(gl.arange(0, PARTS, gl.SliceLayout(1, OF_PARTS)), 1)
    local = gl.expand_dims(gl.arange(0, HEADS, gl.SliceLayout(0, OF_PARTS)), 0)
    at = part * HEADS + local
    tops = gl.load(stats + at * 2, part < splits, -float("inf"), cache_modifier=".cg")
    totals = gl.load(stats + at * 2 + 1, part < splits, 0.0, cache_modifier=".cg")
    weights = gl.exp2(tops - gl.expand_dims(gl.max(tops, 0), 0))
    weights = weights / gl.expand_dims(gl.sum(totals * weights, 0), 0)
    dim = gl.arange(0, WIDTH, gl.SliceLayout(0, gl.SliceLayout(0, LAYOUT)))
    wide = gl.expand_dims(gl.expand_dims(dim, 0), 0)
    for share in range(split, PARTS, splits):
        cells = gl.expand_dims(at * _LATENT, 2) + share * WIDTH + wide
        found = gl.load(sums + cells, gl.expand_dims((part < splits) & (weights > 0), 2), 0.0, cache_modifier=".cg")
        result = gl.sum(found * gl.expand_dims(weights, 2), 0)
        head = gl.expand_dims(first_head + gl.arange(0, HEADS, gl.SliceLayout(1, result.type.layout)), 1)
        number = gl.expand_dims(share * WIDTH + gl.arange(0, WIDTH, gl.SliceLayout(0, result.type.layout)), 0)
        is_inside = (head < num_heads) & (number >= 0)
        gl.store(output + head * _LATENT + number, result.to(output.dtype.element_ty), is_inside)
    if gl.atomic_add(counter, 1, sem="relaxed", scope="gpu") == 2 * splits - 1:  # all have seen that all are there
        gl.store(counter, 0)


@gluon.jit
def _attend(
    GROUP: gl.constexpr, query, output, latents, turned, q_latent, q_turned, weights_smem, other_stats, ready, free, asked, done,
    sums, stats, counter, first_key, last_key, num_tiles, first_head, slot, split, splits, num_heads, factor,
    HEADS: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """A computing warp group: every second tile. The first one brings the query, and what both have found, where it belongs."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEADS, 16])
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    FOUND: gl.constexpr = gl.SwizzledSharedLayout(2, 1, 8, [1, 0])
    dtype: gl.constexpr = q_latent.dtype
    if GROUP == 0:
        _query_to(q_latent, query, first_head, num_heads, 0, _LATENT, HEADS)
        _query_to(q_turned, query, first_head, num_heads, _LATENT, _ROPE, HEADS)
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.arrive(asked, count=1)
    else:
        mbarrier.wait(asked, 0)
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
    # The second group's last tile has left its memory.
    others = latents._reinterpret(gl.float32, [_KEYS // HEADS, _LATENT, HEADS], FOUND).index(_KEYS // HEADS // 2)
    if GROUP == 1:
        others.store(found)
        other_stats.index(0).store(top)
        other_stats.index(1).store(total)
        gl.thread_barrier()
        mbarrier.arrive(done, count=1)
    else:
        mbarrier.wait(done, 0)
        other_top = other_stats.index(0).load(gl.SliceLayout(0, LAYOUT))
        both_top = gl.maximum(top, other_top)
        finite = gl.where(both_top == -float("inf"), 0.0, both_top)
        own_share, other_share = gl.exp2(top - finite), gl.exp2(other_top - finite)
        total = total * own_share + other_stats.index(1).load(gl.SliceLayout(0, LAYOUT)) * other_share
        found = found * gl.expand_dims(own_share, 0) + others.load(LAYOUT) * gl.expand_dims(other_share, 0)
        local_head = gl.arange(0, HEADS, layout=gl.SliceLayout(0, LAYOUT))
        dim = gl.expand_dims(gl.arange(0, _LATENT, layout=gl.SliceLayout(1, LAYOUT)), 1)
        if PARTS == 1:
            head = first_head + local_head
            to = output + gl.expand_dims(head * _LATENT, 0) + dim
            result = (found / gl.expand_dims(total, 0)).to(output.dtype.element_ty)
            gl.store(to, result, gl.expand_dims(head < num_heads, 0) & (dim >= 0))
        else:
            sums += slot * (HEADS * _LATENT)
            stats += slot * (HEADS * 2)
            part = split * HEADS + local_head
            gl.store(sums + gl.expand_dims(part * _LATENT, 0) + dim, found)
            gl.store(stats + part * 2, both_top)
            gl.store(stats + part * 2 + 1, total)
            _merge(sums, stats, output, counter, split, splits, first_head, num_heads, PARTS, HEADS)


@gluon.jit(do_not_specialize=["num_reqs", "stride_table", "splits", "searches"])
def hopper_latent_kernel(
    query, output, pages, sums, stats, counters, query_start_loc, seq_lens, block_table, num_reqs, stride_query, stride_output,
    stride_table, block_rows, num_heads, splits, searches, factor, BLOCK_SIZE: gl.constexpr, HEADS: gl.constexpr,
    PARTS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """One program for HEADS heads, a token, and a split of the token's context. Rows are found as in `latent_attention_kernel`.

    Programs that bring their parts together wait for each other. They follow one another in the order in which programs start, but
    for other heads of their token, so those of one token at most ever wait for some that have not started."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    first_head, split, token = gl.program_id(0) * HEADS, gl.program_id(1), gl.program_id(2)
    # Rows of one token each: it is the row of its number. All that says so comes at once.
    row = gl.minimum(token, num_reqs - 1)
    num_tokens = gl.load(query_start_loc + num_reqs)
    start, end, length = gl.load(query_start_loc + row), gl.load(query_start_loc + row + 1), gl.load(seq_lens + row)
    if token < num_tokens:
        if (start != token) | (end != token + 1):  # else it is looked for, load after load
            low, high = 0, num_reqs
            for _ in range(searches):
                middle = (low + high) // 2
                is_before = gl.load(query_start_loc + gl.minimum(middle, num_reqs)) <= token
                low = gl.where(is_before & (middle < high), middle, low)
                high = gl.where(is_before, high, middle)
            row = low
            start, end = gl.load(query_start_loc + row), gl.load(query_start_loc + row + 1)
            length = gl.load(seq_lens + row)
        num_keys = length - (end - start) + (token - start) + 1
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
        other_stats = gl.allocate_shared_memory(gl.float32, [2, HEADS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        ready = gl.allocate_shared_memory(gl.int64, [_GROUPS, 1], mbarrier.MBarrierLayout())
        free = gl.allocate_shared_memory(gl.int64, [_GROUPS, 1], mbarrier.MBarrierLayout())
        asked = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        done = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        for group in gl.static_range(_GROUPS):
            mbarrier.init(ready.index(group), count=_PAGES)
            mbarrier.init(free.index(group), count=1)
        mbarrier.init(asked, count=1)
        mbarrier.init(done, count=1)
        fence_async_shared()
        first_key, last_page = first_tile * _KEYS, (num_keys - 1) // _PAGE
        table = block_table + row.to(gl.int64) * stride_table
        own = query + token.to(gl.int64) * stride_query
        to = output + token.to(gl.int64) * stride_output
        place = token * gl.num_programs(0) + gl.program_id(0)
        slot = place.to(gl.int64) * splits
        counter = counters + place
        gl.warp_specialize(
            [
                (_attend, (
                    gl.constexpr(0), own, to, latents, turned, q_latent, q_turned, weights.index(0), other_stats, ready, free, asked,
                    done, sums, stats, counter, first_key, num_keys, num_tiles, first_head, slot, split, splits, num_heads, factor,
                    HEADS, PARTS,
                )),
                (_attend, (
                    gl.constexpr(1), own, to, latents, turned, q_latent, q_turned, weights.index(1), other_stats, ready, free, asked,
                    done, sums, stats, counter, first_key, num_keys, num_tiles, first_head, slot, split, splits, num_heads, factor,
                    HEADS, PARTS,
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

    32 rows of 8,000 latents on an H200: 16 heads 79.2 us (88.9 % of copy bandwidth). 128 heads took 302 us when parts were merged by
    a kernel of their own, where the portable kernel takes 925 and programs of 16 heads 390: bound by products, whose 32 columns use the
    tensor cores less than the latents' bytes the memory."""

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
        """Return whether the step is small enough."""
        return query.shape[0] * query.shape[1] <= MOST_ROWS

    def __init__(self, cache: Tensor, *, num_heads: int, scale: float) -> None:
        self._heads = 16 if num_heads <= 32 else 32
        rows, self._block_rows = _page_rows(cache)
        self._pages = TensorDescriptor.from_tensor(rows, [PAGE, 64], gl.NVMMASharedLayout(128, 16, rank=2))
        self._device, self._dtype, self._factor = cache.device, cache.dtype, scale * LOG2_E
        self._block_size, self._pdl = cache.shape[1], has_pdl(cache.device)
        self._options = launch_options(self._pdl)
        self._counters = torch.zeros(2 * num_sms(cache.device), dtype=torch.int32, device=cache.device)

    def __call__(
        self, query: Tensor, output: Tensor, query_start_loc: Tensor, seq_lens: Tensor, block_table: Tensor, *,
        max_seq_len: int, splits: int | None = None,
    ) -> None:  # fmt: skip
        """Tensors as those of `latent_attention`. splits: programs that share a context; chosen when None."""
        num_tokens, num_heads, _ = query.shape
        if num_tokens == 0:
            return
        num_reqs, groups = seq_lens.shape[0], triton.cdiv(num_heads, self._heads)
        programs = num_sms(self._device)
        # Those of one token wait for each other, so all of them have to run at once.
        most = max(programs // groups, 1)
        splits = min(splits or splits_to_fill(num_tokens * groups, programs, max_seq_len), most)
        sums = stats = None
        if splits > 1:
            shape = (num_tokens, groups, splits, self._heads)
            sums = torch.empty(*shape, LATENT, dtype=torch.float32, device=self._device)
            stats = torch.empty(*shape, 2, dtype=torch.float32, device=self._device)
        constants: dict[str, Any] = {
            "BLOCK_SIZE": self._block_size, "HEADS": self._heads, "PARTS": triton.next_power_of_2(splits),
            "PDL": self._pdl,
        }  # fmt: skip
        strides = query.stride(0), output.stride(0), block_table.stride(0), self._block_rows, num_heads
        key = (
            self._dtype, self._device, *strides[:2], *strides[3:],
            alignment(query, output, query_start_loc, seq_lens, block_table), *constants.values(),
        )  # fmt: skip
        arguments = (
            query, output, self._pages, sums, stats, self._counters, query_start_loc, seq_lens, block_table, num_reqs,
            *strides, splits, num_reqs.bit_length() + 1, self._factor,
        )  # fmt: skip
        _launch(key, (groups, splits, num_tokens), arguments, constants, num_warps=4, **self._options)
