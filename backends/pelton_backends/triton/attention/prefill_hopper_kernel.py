"""The kernel of `prefill_hopper.py`, in Gluon, which says itself what layouts, barriers and copies there are.

Persistent: programs take items (a block of a row's queries for one kv head, or a share of their keys) until none is left,
the longest of a row first. A warp takes them and copies keys and values; two warp groups compute. While an item ends, the
next one's keys and queries are on their way.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

_LOG2E = gl.constexpr(1.4426950408889634)
PAGE = 16  # tokens a copy; blocks are multiples of it
_PAGE = gl.constexpr(PAGE)
ROWS = 64  # of a warp group
_ROWS = gl.constexpr(ROWS)


@gluon.jit
def _share(
    item, query_start_loc, seq_lens, first_row, num_reqs, num_heads, num_blocks, num_splits, window,
    BLOCK_Q: gl.constexpr, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, SPLIT: gl.constexpr,
    SKIP_SINGLE: gl.constexpr,
):  # fmt: skip
    """An item's kv head, share, row and tiles; items count heads first, then blocks, then shares, and rows are found as in
    `prefill.py`. num_tiles is 0 where the share has no keys, -1 where the block has no queries."""
    kv_head = item % num_heads
    block = item // num_heads % num_blocks
    split = item // (num_heads * num_blocks)
    index = num_blocks - 1 - block + gl.load(query_start_loc + first_row) // BLOCK_Q + first_row
    row, above = first_row, num_reqs
    while above - row > 1:
        middle = (row + above) // 2
        if gl.load(query_start_loc + middle) // BLOCK_Q + middle <= index:
            row = middle
        else:
            above = middle
    row_start = gl.load(query_start_loc + row)
    query_len = gl.load(query_start_loc + row + 1) - row_start
    first_token = (index - (row_start // BLOCK_Q + row)) * BLOCK_Q
    seq_len = gl.load(seq_lens + row)
    first_position = seq_len - query_len + first_token
    end = seq_len
    if CAUSAL:
        end = gl.minimum(first_position + BLOCK_Q, seq_len)
    first_tile = 0
    if WINDOW:
        first_tile = gl.maximum(first_position - window + 1, 0) // BLOCK_N
    num_tiles = (end + BLOCK_N - 1) // BLOCK_N - first_tile
    if SPLIT:
        share = (num_tiles + num_splits - 1) // num_splits
        first_tile += split * share
        num_tiles = gl.maximum(gl.minimum(num_tiles - split * share, share), 0)
    is_none = first_token >= query_len
    if SKIP_SINGLE:
        is_none = is_none | (query_len == 1)
    num_tiles = gl.where(is_none, -1, num_tiles)
    return kv_head, split, row, row_start, query_len, first_token, seq_len, first_tile, num_tiles


@gluon.jit
def _following(
    n, items, items_ready, items_free, query_start_loc, seq_lens, first_row, num_reqs, num_heads, num_blocks, num_splits,
    num_items, window,
    BLOCK_Q: gl.constexpr, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, SPLIT: gl.constexpr,
    SKIP_SINGLE: gl.constexpr,
):  # fmt: skip
    """Return the item that a computing warp group takes after its n-th, as the copying warp says; num_items: none."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    slot = n % 2
    mbarrier.wait(items_ready.index(slot), (n // 2) & 1)
    item = gl.max(items.index(slot).load(ONE), 0)
    gl.thread_barrier()
    mbarrier.arrive(items_free.index(slot), count=1)
    kv_head, split, _, row_start, query_len, first_token, seq_len, first_tile, num_tiles = _share(
        gl.minimum(item, num_items - 1), query_start_loc, seq_lens, first_row, num_reqs, num_heads, num_blocks, num_splits,
        window, BLOCK_Q, BLOCK_N, CAUSAL, WINDOW, SPLIT, SKIP_SINGLE,
    )  # fmt: skip
    return item, kv_head, split, row_start, query_len, first_token, seq_len, first_tile, num_tiles


@gluon.jit
def _copy_pages(
    k_pages, v_pages, k_smem, v_smem, k_ready, k_free, v_ready, v_free, items, items_ready, items_free, counters,
    query_start_loc, seq_lens, block_table, table_stride, first_row, num_reqs, num_heads, num_blocks, num_splits, num_items,
    window, k_block_rows, v_block_rows, k_head_rows, v_head_rows, k_head_columns, v_head_columns,
    BLOCK_Q: gl.constexpr, BLOCK_SIZE: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, SPLIT: gl.constexpr, SKIP_SINGLE: gl.constexpr,
):  # fmt: skip
    """The copying warp: it takes items, tells the others, and fetches their tiles' keys and values, the last tile first."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    done = 0
    n = 0
    item = gl.program_id(0)
    while item < num_items:
        kv_head, _, row, _, _, _, seq_len, first_tile, num_tiles = _share(
            item, query_start_loc, seq_lens, first_row, num_reqs, num_heads, num_blocks, num_splits, window,
            BLOCK_Q, BLOCK_N, CAUSAL, WINDOW, SPLIT, SKIP_SINGLE,
        )  # fmt: skip
        if num_tiles > 0:
            _copy_tiles(
                k_pages, v_pages, k_smem, v_smem, k_ready, k_free, v_ready, v_free,
                block_table + row.to(gl.int64) * table_stride, first_tile, num_tiles, seq_len, done,
                k_block_rows, v_block_rows, kv_head * k_head_rows, kv_head * v_head_rows,
                kv_head * k_head_columns, kv_head * v_head_columns, BLOCK_SIZE, BLOCK_N, D, STAGES,
            )  # fmt: skip
            done += num_tiles
        item = num_items
        if num_items > gl.num_programs(0):
            item = gl.atomic_add(counters, 1, sem="relaxed") + gl.num_programs(0)
        slot = n % 2
        mbarrier.wait(items_free.index(slot), ((n // 2) & 1) ^ 1)
        items.index(slot).store(gl.full([1], item, gl.int32, ONE))
        gl.thread_barrier()
        mbarrier.arrive(items_ready.index(slot), count=1)
        n += 1
    if num_items > gl.num_programs(0):  # noqa: SIM102
        if gl.atomic_add(counters + 1, 1, sem="acq_rel", scope="gpu") == gl.num_programs(0) - 1:
            gl.store(counters, 0)  # for the next launch
            gl.store(counters + 1, 0)


@gluon.jit
def _copy_tiles(
    k_pages, v_pages, k_smem, v_smem, k_ready, k_free, v_ready, v_free, table, first_tile, num_tiles, seq_len, done,
    k_block_rows, v_block_rows, k_row, v_row, k_column, v_column,
    BLOCK_SIZE: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    PAGES: gl.constexpr = BLOCK_N // _PAGE
    PANELS: gl.constexpr = D // 64
    BYTES: gl.constexpr = BLOCK_N * D * 2
    last_page = (seq_len - 1) // _PAGE  # the table says nothing of what lies behind
    for i in range(done, done + num_tiles):
        tile = first_tile + num_tiles - 1 - (i - done)
        stage, phase = i % STAGES, (i // STAGES) & 1
        # Table entries first: their way from memory passes while the stage is still in use.
        blocks = ()
        for p in gl.static_range(PAGES):
            page = gl.minimum(tile * PAGES + p, last_page)
            blocks = blocks + (gl.load(table + page * _PAGE // BLOCK_SIZE),)  # noqa: RUF005  Gluon unpacks no tuple
        mbarrier.wait(k_free.index(stage), phase ^ 1)
        mbarrier.expect(k_ready.index(stage), BYTES)
        for p in gl.static_range(PAGES):
            page = gl.minimum(tile * PAGES + p, last_page)
            row = blocks[p] * k_block_rows + page * _PAGE % BLOCK_SIZE + k_row
            for panel in gl.static_range(PANELS):
                place = k_smem.index((stage * PANELS + panel) * PAGES + p)
                tma.async_copy_global_to_shared(k_pages, [row, k_column + panel * 64], k_ready.index(stage), place)
        mbarrier.wait(v_free.index(stage), phase ^ 1)
        mbarrier.expect(v_ready.index(stage), BYTES)
        for p in gl.static_range(PAGES):
            page = gl.minimum(tile * PAGES + p, last_page)
            row = blocks[p] * v_block_rows + page * _PAGE % BLOCK_SIZE + v_row
            for panel in gl.static_range(PANELS):
                place = v_smem.index((stage * PANELS + panel) * PAGES + p)
                tma.async_copy_global_to_shared(v_pages, [row, v_column + panel * 64], v_ready.index(stage), place)


@gluon.jit
def _weights(
    scores, highest, denominator, tile, q_position, seq_len, factor, window,
    BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, MASKED: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """One tile's scores -> softmax weights, and the running maximum, sum and factor for what was summed before."""
    if MASKED:
        position = tile * BLOCK_N + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, LAYOUT))
        is_seen = gl.expand_dims(position < seq_len, 0)
        if CAUSAL:
            is_seen = is_seen & (gl.expand_dims(position, 0) <= gl.expand_dims(q_position, 1))
        if WINDOW:
            is_seen = is_seen & (gl.expand_dims(q_position, 1) - gl.expand_dims(position, 0) < window)
        scores = gl.where(is_seen, scores, -float("inf"))
    now_highest = gl.maximum(highest, gl.max(scores, 1) * factor)
    finite = now_highest
    if MASKED:
        finite = gl.where(now_highest == -float("inf"), 0.0, now_highest)  # a query that has seen no key yet
    weights = gl.exp2(scores * factor - gl.expand_dims(finite, 1))
    shrink = gl.exp2(highest - finite)
    return weights, now_highest, denominator * shrink + gl.sum(weights, 1), shrink


@gluon.jit
def _keep_rows(tile, first, end, BLOCK_N: gl.constexpr, COPY: gl.constexpr):
    """Zeros in a tile's rows outside of first .. end - 1. Slots past the sequence, and in blocks that a window has left, hold
    anything, NaN too, which a weight of 0 would not silence. Both warp groups write the same zeros. Few rows at a time: there
    are no registers left for a tile."""
    ROWS: gl.constexpr = 16
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, COPY))
    for start in gl.static_range(0, BLOCK_N, ROWS):
        part = tile.slice(start, ROWS)
        values = part.load(COPY)
        is_kept = (start + row >= first) & (start + row < end)
        part.store(gl.where(gl.expand_dims(is_kept, 1), values, gl.zeros_like(values)))
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def _step(
    i, acc, weights, highest, denominator, q_smem, k_tiles, v_tiles, k_ready, k_free, v_ready, v_free,
    done, last_tile, q_position, seq_len, factor, window,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
    MASKED: gl.constexpr, S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Scores of tile i and the sum over tile i - 1 run together on the tensor cores; then the weights of tile i, beside the sum."""
    at = done + i
    stage, phase = at % STAGES, (at // STAGES) & 1
    before, before_phase = (at - 1) % STAGES, ((at - 1) // STAGES) & 1
    mbarrier.wait(k_ready.index(stage), phase)
    nothing = gl.zeros([_ROWS, BLOCK_N], gl.float32, S_LAYOUT)
    scores = warpgroup_mma(q_smem, k_tiles.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
    mbarrier.wait(v_ready.index(before), before_phase)
    acc = warpgroup_mma(weights, v_tiles.index(before), acc, is_async=True)
    scores = warpgroup_mma_wait(1, [scores])
    gl.thread_barrier()
    mbarrier.arrive(k_free.index(stage), count=1)
    now_weights, highest, denominator, shrink = _weights(
        scores, highest, denominator, last_tile - i, q_position, seq_len, factor, window,
        BLOCK_N, CAUSAL, WINDOW, MASKED, S_LAYOUT,
    )  # fmt: skip
    acc = warpgroup_mma_wait(0, [acc])
    gl.thread_barrier()
    mbarrier.arrive(v_free.index(before), count=1)
    shrink = gl.convert_layout(shrink, gl.SliceLayout(1, O_LAYOUT), assert_trivial=True)
    acc = acc * gl.expand_dims(shrink, 1)
    weights = gl.convert_layout(now_weights.to(q_smem.dtype), gl.DotOperandLayout(0, O_LAYOUT, 2), assert_trivial=True)
    return acc, weights, highest, denominator


@gluon.jit
def _rows_of_query(
    GROUP_INDEX: gl.constexpr, query, row_start, query_len, first_token, kv_head, q_stride,
    G: gl.constexpr, D: gl.constexpr, COPY: gl.constexpr,
):  # fmt: skip
    """A warp group's rows of an item, zeros where there is no token: 64 // G tokens by G heads."""
    TOKENS: gl.constexpr = _ROWS // G
    m = gl.arange(0, _ROWS, layout=gl.SliceLayout(1, COPY))
    d = gl.arange(0, D, layout=gl.SliceLayout(0, COPY))
    token = first_token + GROUP_INDEX * TOKENS + m // G
    is_row = (m < TOKENS * G) & (token < query_len)
    column = (kv_head * G + m % G) * D
    at = gl.expand_dims((row_start + token).to(gl.int64) * q_stride + column, 1) + gl.expand_dims(d, 0)
    return gl.load(query + at, gl.expand_dims(is_row, 1) & (gl.expand_dims(d, 0) < D), 0.0)


@gluon.jit
def _attend(
    GROUP_INDEX: gl.constexpr, query, output, parts, logs, sinks, q_smem, k_smem, v_smem, k_ready, k_free, v_ready, v_free,
    items, items_ready, items_free, query_start_loc, seq_lens, first_row, num_reqs, num_heads, num_blocks, num_splits,
    num_items, num_tokens, q_stride, output_stride, factor, window,
    G: gl.constexpr, D: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, SINKS: gl.constexpr, SPLIT: gl.constexpr, SKIP_SINGLE: gl.constexpr,
):  # fmt: skip
    """A computing warp group: its half of every item."""
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    TOKENS: gl.constexpr = _ROWS // G
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    k_tiles = k_smem._reinterpret(q_smem.dtype, [STAGES, BLOCK_N, D], TILE)
    v_tiles = v_smem._reinterpret(q_smem.dtype, [STAGES, BLOCK_N, D], TILE)
    done = 0
    n = 0
    item = gl.program_id(0)
    kv_head, split, _, row_start, query_len, first_token, seq_len, first_tile, num_tiles = _share(
        item, query_start_loc, seq_lens, first_row, num_reqs, num_heads, num_blocks, num_splits, window,
        BLOCK_Q, BLOCK_N, CAUSAL, WINDOW, SPLIT, SKIP_SINGLE,
    )  # fmt: skip
    rows = _rows_of_query(GROUP_INDEX, query, row_start, query_len, first_token, kv_head, q_stride, G, D, COPY)
    while item < num_items:
        q_smem.store(rows)
        fence_async_shared()
        gl.thread_barrier()
        if num_tiles > 0:
            acc, weights, highest, denominator = _attend_tiles(
                GROUP_INDEX, sinks, q_smem, k_tiles, v_tiles, k_ready, k_free, v_ready, v_free, query_len, seq_len,
                first_token, kv_head, split, first_tile, num_tiles, done, factor, window,
                G, D, BLOCK_N, STAGES, CAUSAL, WINDOW, SINKS,
            )  # fmt: skip
            done += num_tiles
            last, last_phase = (done - 1) % STAGES, ((done - 1) // STAGES) & 1
            mbarrier.wait(v_ready.index(last), last_phase)
            acc = warpgroup_mma(weights, v_tiles.index(last), acc, is_async=True)
            item, next_head, next_split, next_start, next_len, next_token, next_seq_len, next_tile, next_tiles = _following(
                n, items, items_ready, items_free, query_start_loc, seq_lens, first_row, num_reqs, num_heads, num_blocks,
                num_splits, num_items, window, BLOCK_Q, BLOCK_N, CAUSAL, WINDOW, SPLIT, SKIP_SINGLE,
            )  # fmt: skip
            rows = _rows_of_query(GROUP_INDEX, query, next_start, next_len, next_token, next_head, q_stride, G, D, COPY)
            acc = warpgroup_mma_wait(0, [acc])
            gl.thread_barrier()
            mbarrier.arrive(v_free.index(last), count=1)
            _write(
                GROUP_INDEX, acc, highest, denominator, output, parts, logs, q_smem, row_start, query_len, first_token,
                kv_head, num_heads * G, split, num_tokens, output_stride, G, D, BLOCK_N, SPLIT,
            )  # fmt: skip
        else:
            if SPLIT and num_tiles == 0:  # a share without keys has no result, and says so
                m = gl.arange(0, _ROWS, layout=gl.SliceLayout(1, COPY))
                token = first_token + GROUP_INDEX * TOKENS + m // G
                at = (split * num_tokens + row_start + token).to(gl.int64) * (num_heads * G) + kv_head * G + m % G
                gl.store(logs + at, float("-inf"), (m < TOKENS * G) & (token < query_len))
            item, next_head, next_split, next_start, next_len, next_token, next_seq_len, next_tile, next_tiles = _following(
                n, items, items_ready, items_free, query_start_loc, seq_lens, first_row, num_reqs, num_heads, num_blocks,
                num_splits, num_items, window, BLOCK_Q, BLOCK_N, CAUSAL, WINDOW, SPLIT, SKIP_SINGLE,
            )  # fmt: skip
            rows = _rows_of_query(GROUP_INDEX, query, next_start, next_len, next_token, next_head, q_stride, G, D, COPY)
        n += 1
        kv_head, split, row_start, query_len = next_head, next_split, next_start, next_len
        first_token, seq_len, first_tile, num_tiles = next_token, next_seq_len, next_tile, next_tiles


@gluon.jit
def _attend_tiles(
    GROUP_INDEX: gl.constexpr, sinks, q_smem, k_tiles, v_tiles, k_ready, k_free, v_ready, v_free, query_len, seq_len,
    first_token, kv_head, split, first_tile, num_tiles, done, factor, window,
    G: gl.constexpr, D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr, SINKS: gl.constexpr,
):  # fmt: skip
    """All tiles of an item but for the sum over the first one's values, which is left: it and its weights are returned."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    dtype: gl.constexpr = q_smem.dtype
    TOKENS: gl.constexpr = _ROWS // G
    s_row = gl.arange(0, _ROWS, layout=gl.SliceLayout(1, S_LAYOUT))
    first_position = seq_len - query_len + first_token + GROUP_INDEX * TOKENS
    q_position = first_position + s_row // G
    last_tile = first_tile + num_tiles - 1
    # Tiles before `whole`, counted from the last, hold keys that some query does not see.
    if CAUSAL:
        whole = last_tile + 1 - (first_position + 1) // BLOCK_N
    else:
        whole = last_tile + 1 - seq_len // BLOCK_N
    whole = gl.minimum(gl.maximum(whole, 1), num_tiles)
    windowed = num_tiles
    if WINDOW:  # and so do those from `windowed` on
        last_position = gl.minimum(first_position + TOKENS, seq_len) - 1
        low = gl.maximum(last_position - window + BLOCK_N, 0) // BLOCK_N
        windowed = gl.minimum(gl.maximum(last_tile + 1 - low, whole), num_tiles)

    highest = gl.full([_ROWS], -float("inf"), gl.float32, gl.SliceLayout(1, S_LAYOUT))
    denominator = gl.zeros([_ROWS], gl.float32, gl.SliceLayout(1, S_LAYOUT))
    if SINKS:  # the first share has it
        sink = gl.load(sinks + kv_head * G + s_row % G).to(gl.float32) * _LOG2E
        highest = gl.where(split == 0, sink, highest)
        denominator = gl.where(split == 0, 1.0, denominator)
    acc = gl.zeros([_ROWS, D], gl.float32, O_LAYOUT)

    stage, phase = done % STAGES, (done // STAGES) & 1
    mbarrier.wait(k_ready.index(stage), phase)
    nothing = gl.zeros([_ROWS, BLOCK_N], gl.float32, S_LAYOUT)
    scores = warpgroup_mma(q_smem, k_tiles.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, [scores])
    gl.thread_barrier()
    mbarrier.arrive(k_free.index(stage), count=1)
    weights, highest, denominator, _ = _weights(
        scores, highest, denominator, last_tile, q_position, seq_len, factor, window,
        BLOCK_N, CAUSAL, WINDOW, True, S_LAYOUT,
    )  # fmt: skip
    weights = gl.convert_layout(weights.to(dtype), gl.DotOperandLayout(0, O_LAYOUT, 2), assert_trivial=True)
    if (last_tile + 1) * BLOCK_N > seq_len:
        mbarrier.wait(v_ready.index(stage), phase)
        _keep_rows(v_tiles.index(stage), 0, seq_len - last_tile * BLOCK_N, BLOCK_N, COPY)

    for i in range(1, whole):
        acc, weights, highest, denominator = _step(
            i, acc, weights, highest, denominator, q_smem, k_tiles, v_tiles, k_ready, k_free, v_ready, v_free, done,
            last_tile, q_position, seq_len, factor, window, BLOCK_N, STAGES, CAUSAL, WINDOW, True, S_LAYOUT, O_LAYOUT,
        )  # fmt: skip
    for i in range(whole, windowed):
        acc, weights, highest, denominator = _step(
            i, acc, weights, highest, denominator, q_smem, k_tiles, v_tiles, k_ready, k_free, v_ready, v_free, done,
            last_tile, q_position, seq_len, factor, window, BLOCK_N, STAGES, CAUSAL, WINDOW, False, S_LAYOUT, O_LAYOUT,
        )  # fmt: skip
    if WINDOW:
        for i in range(windowed, num_tiles):
            acc, weights, highest, denominator = _step(
                i, acc, weights, highest, denominator, q_smem, k_tiles, v_tiles, k_ready, k_free, v_ready, v_free, done,
                last_tile, q_position, seq_len, factor, window, BLOCK_N, STAGES, CAUSAL, WINDOW, True, S_LAYOUT, O_LAYOUT,
            )  # fmt: skip
        least = seq_len - query_len + first_token - window + 1
        if first_tile * BLOCK_N < least:
            at = done + num_tiles - 1
            mbarrier.wait(v_ready.index(at % STAGES), (at // STAGES) & 1)
            _keep_rows(v_tiles.index(at % STAGES), least - first_tile * BLOCK_N, BLOCK_N, BLOCK_N, COPY)
    return acc, weights, highest, denominator


@gluon.jit
def _write(
    GROUP_INDEX: gl.constexpr, acc, highest, denominator, output, parts, logs, q_smem, row_start, query_len, first_token,
    kv_head, num_heads, split, num_tokens, output_stride,
    G: gl.constexpr, D: gl.constexpr, BLOCK_N: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """An item's result; the queries' memory brings it into order."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    TOKENS: gl.constexpr = _ROWS // G
    token_begin = first_token + GROUP_INDEX * TOKENS
    if SPLIT:
        s_row = gl.arange(0, _ROWS, layout=gl.SliceLayout(1, S_LAYOUT))
        token = token_begin + s_row // G
        is_row = (s_row < TOKENS * G) & (token < query_len)
        at = (split * num_tokens + row_start + token).to(gl.int64) * num_heads + kv_head * G + s_row % G
        gl.store(logs + at, highest + gl.log2(denominator), is_row)  # -inf without keys
        o_row = gl.arange(0, _ROWS, layout=gl.SliceLayout(1, O_LAYOUT))
        token = token_begin + o_row // G
        is_row = (o_row < TOKENS * G) & (token < query_len)
        at = (split * num_tokens + row_start + token).to(gl.int64) * num_heads + kv_head * G + o_row % G
        column = gl.expand_dims(gl.arange(0, D, layout=gl.SliceLayout(0, O_LAYOUT)), 0)
        denominator = gl.where(denominator == 0.0, 1.0, denominator)
        denominator = gl.convert_layout(denominator, gl.SliceLayout(1, O_LAYOUT), assert_trivial=True)
        part_at = gl.expand_dims(at * D, 1) + column
        gl.store(parts + part_at, acc / gl.expand_dims(denominator, 1), gl.expand_dims(is_row, 1) & (column < D))
    else:
        denominator = gl.where(denominator == 0.0, 1.0, denominator)
        denominator = gl.convert_layout(denominator, gl.SliceLayout(1, O_LAYOUT), assert_trivial=True)
        q_smem.store((acc / gl.expand_dims(denominator, 1)).to(q_smem.dtype))
        m = gl.arange(0, _ROWS, layout=gl.SliceLayout(1, COPY))
        d = gl.expand_dims(gl.arange(0, D, layout=gl.SliceLayout(0, COPY)), 0)
        token = token_begin + m // G
        is_row = (m < TOKENS * G) & (token < query_len)
        at = (row_start + token).to(gl.int64) * output_stride + (kv_head * G + m % G) * D
        gl.store(output + gl.expand_dims(at, 1) + d, q_smem.load(COPY), gl.expand_dims(is_row, 1) & (d < D))


@gluon.jit(
    do_not_specialize=["num_tokens", "table_stride", "first_row", "num_reqs", "num_heads", "num_blocks", "num_splits"]
)
def hopper_prefill_kernel(
    query, k_pages, v_pages, output, parts, logs, query_start_loc, seq_lens, block_table, counters, sinks, num_tokens,
    q_stride, output_stride, table_stride,
    k_block_rows, v_block_rows, k_head_rows, v_head_rows, k_head_columns, v_head_columns, first_row, num_reqs, scale, window,
    num_heads, num_blocks, num_splits,
    G: gl.constexpr, D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, SINKS: gl.constexpr, SPLIT: gl.constexpr, SKIP_SINGLE: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """An item: one of `num_heads` kv heads, 2 (64 // G) tokens of one row, with SPLIT one share of their keys.

    counters [2] int32, zeros, and zeros again at the end: items taken after each program's first one, if there are more items than
    programs, and programs that have taken their last.
    """
    BLOCK_Q: gl.constexpr = 2 * (_ROWS // G)
    if PDL:
        gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    num_items = num_heads * num_blocks * num_splits
    factor = scale * _LOG2E

    dtype: gl.constexpr = query.dtype.element_ty
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    PIECES: gl.constexpr = STAGES * (D // 64) * (BLOCK_N // _PAGE)
    q0 = gl.allocate_shared_memory(dtype, [_ROWS, D], TILE)
    q1 = gl.allocate_shared_memory(dtype, [_ROWS, D], TILE)
    # A tile of NVMMASharedLayout is its 64-column panels one after the other, and 16 rows of a panel lie together: a page
    # goes to where the tile wants it.
    k_smem = gl.allocate_shared_memory(dtype, [PIECES, _PAGE, 64], TILE)
    v_smem = gl.allocate_shared_memory(dtype, [PIECES, _PAGE, 64], TILE)
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(stage), count=1)
        mbarrier.init(v_ready.index(stage), count=1)
        mbarrier.init(k_free.index(stage), count=2)
        mbarrier.init(v_free.index(stage), count=2)
    items = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    items_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    items_free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(2):
        mbarrier.init(items_ready.index(slot), count=1)
        mbarrier.init(items_free.index(slot), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_attend, (
                gl.constexpr(0), query, output, parts, logs, sinks, q0, k_smem, v_smem, k_ready, k_free, v_ready, v_free,
                items, items_ready, items_free, query_start_loc, seq_lens, first_row, num_reqs, num_heads, num_blocks,
                num_splits, num_items, num_tokens,
                q_stride, output_stride, factor, window, G, D, BLOCK_Q, BLOCK_N, STAGES, CAUSAL, WINDOW, SINKS, SPLIT,
                SKIP_SINGLE,
            )),
            (_attend, (
                gl.constexpr(1), query, output, parts, logs, sinks, q1, k_smem, v_smem, k_ready, k_free, v_ready, v_free,
                items, items_ready, items_free, query_start_loc, seq_lens, first_row, num_reqs, num_heads, num_blocks,
                num_splits, num_items, num_tokens,
                q_stride, output_stride, factor, window, G, D, BLOCK_Q, BLOCK_N, STAGES, CAUSAL, WINDOW, SINKS, SPLIT,
                SKIP_SINGLE,
            )),
            (_copy_pages, (
                k_pages, v_pages, k_smem, v_smem, k_ready, k_free, v_ready, v_free, items, items_ready, items_free,
                counters, query_start_loc, seq_lens, block_table, table_stride, first_row, num_reqs, num_heads, num_blocks,
                num_splits, num_items, window, k_block_rows, v_block_rows, k_head_rows, v_head_rows, k_head_columns, v_head_columns,
                BLOCK_Q, BLOCK_SIZE, BLOCK_N, D, STAGES, CAUSAL, WINDOW, SPLIT, SKIP_SINGLE,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
