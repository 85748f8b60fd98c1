"""Kernels of the op of experts: multiply, and sum. The op itself is in `experts.py`, choosing in `choose.py`.

T tokens, H hidden size, E experts that this rank holds, k experts a token, I intermediate size; a pair is a token and one of its
experts, of which there are P = T k, number t k + j. A pair of padding, or of an expert of another rank, has expert E, which no kernel
computes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pelton_backends.triton.ops.moe.unsummed import clear_counts, sum_of_pairs
from pelton_backends.triton.ops.pieces import activated
from pelton_backends.triton.runtime import dot, let_next_start, wait_for_inputs


@triton.jit
def gated(gate, up, LIMIT: tl.constexpr, ACTIVATION: tl.constexpr, dtype: tl.constexpr):
    """gate and up float32 -> `dtype`."""
    if ACTIVATION == "silu_clamped":
        if LIMIT is not None:
            gate = tl.minimum(gate, LIMIT)
            up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
        result = activated(gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32), "silu", dtype)
    elif ACTIVATION == "swiglu_oai":
        if LIMIT is not None:
            gate = tl.minimum(gate, LIMIT)
            up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
        result = (gate / (1.0 + tl.exp(-1.702 * gate)) * (up + 1.0)).to(dtype)
    else:
        result = activated(gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32), ACTIVATION, dtype)
    return result


@triton.jit
def tile_of(order_ptr, count_ptr, capacity, tile, E: tl.constexpr, EB: tl.constexpr, BM: tl.constexpr):
    """Expert, pairs [BM], which of them there are, and whether any is, of a tile: the E experts' first BM pairs are the first E tiles,
    further pairs of any expert the tiles behind those. An expert's pairs lie at `capacity` times its number in order [E, capacity]."""
    expert, start = tile, tile * 0
    if tile >= E:
        bins = tl.arange(0, EB)
        counts = tl.load(count_ptr + bins, mask=bins < E, other=0)
        further = tl.maximum((counts + BM - 1) // BM - 1, 0)
        ends = tl.cumsum(further, axis=0)
        expert = tl.sum((ends <= tile - E).to(tl.int32), axis=0)
        begin = tl.sum(tl.where(bins == expert, ends - further, 0), axis=0)
        start = (tile - E - begin + 1) * BM
    count = tl.minimum(tl.load(count_ptr + expert, mask=expert < E, other=0), capacity)
    places = start + tl.arange(0, BM)
    is_row = places < count
    pairs = tl.load(order_ptr + expert.to(tl.int64) * capacity + places, mask=is_row, other=0)
    return expert.to(tl.int64), pairs, is_row, start < count


@triton.jit(do_not_specialize=["capacity"])
def gate_up_kernel(
    x_ptr, weight_ptr, bias_ptr, share_ptr, inner_ptr, order_ptr, count_ptr, capacity, x_stride,
    E: tl.constexpr, EB: tl.constexpr, H: tl.constexpr, SIZE: tl.constexpr, K: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    ACTIVATION: tl.constexpr, LIMIT: tl.constexpr, SCALES_INPUT: tl.constexpr, KEPT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One tile of pairs and BN columns of gate and of up a program: their activation, by pair. KEPT: its eviction policy."""
    tile, columns = tl.program_id(1), tl.program_id(0) * BN + tl.arange(0, BN)
    let_next_start(PDL)
    wait_for_inputs(PDL)
    expert, pairs, is_row, is_tile = tile_of(order_ptr, count_ptr, capacity, tile, E, EB, BM)
    if not is_tile:
        return
    rows = (pairs // K).to(tl.int64)
    if SCALES_INPUT:
        share = tl.load(share_ptr + pairs, mask=is_row, other=0.0)
    is_column = columns < SIZE
    lane = tl.arange(0, BK)
    gates = weight_ptr + (expert * (2 * SIZE) + columns[None, :]) * H + lane[:, None]
    inputs = x_ptr + rows[:, None] * x_stride + lane[None, :]
    gate = tl.zeros((BM, BN), tl.float32)
    up = tl.zeros((BM, BN), tl.float32)
    for k in range(0, H, BK):
        is_in = k + lane < H
        x = tl.load(inputs + k, mask=is_row[:, None] & is_in[None, :], other=0.0)
        if SCALES_INPUT:
            x = (x.to(tl.float32) * share[:, None]).to(x_ptr.dtype.element_ty)
        mask = is_in[:, None] & is_column[None, :]
        gate = dot(x, tl.load(gates + k, mask=mask, other=0.0), gate)
        up = dot(x, tl.load(gates + SIZE * H + k, mask=mask, other=0.0), up)
    if bias_ptr is not None:
        biases = bias_ptr + expert * (2 * SIZE) + columns
        gate += tl.load(biases, mask=is_column, other=0.0).to(tl.float32)[None, :]
        up += tl.load(biases + SIZE, mask=is_column, other=0.0).to(tl.float32)[None, :]
    result = gated(gate, up, LIMIT, ACTIVATION, inner_ptr.dtype.element_ty)
    target = inner_ptr + pairs.to(tl.int64)[:, None] * SIZE + columns[None, :]
    tl.store(target, result, mask=is_row[:, None] & is_column[None, :], eviction_policy=KEPT)


@triton.jit(do_not_specialize=["capacity"])
def down_kernel(
    inner_ptr, weight_ptr, bias_ptr, share_ptr, out_ptr, order_ptr, count_ptr, capacity,
    E: tl.constexpr, EB: tl.constexpr, H: tl.constexpr, SIZE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SCALES_INPUT: tl.constexpr,
    KEPT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One tile of pairs and BN columns a program: weighted outputs, by pair."""
    tile, columns = tl.program_id(1), tl.program_id(0) * BN + tl.arange(0, BN)
    let_next_start(PDL)
    wait_for_inputs(PDL)
    expert, pairs, is_row, is_tile = tile_of(order_ptr, count_ptr, capacity, tile, E, EB, BM)
    if not is_tile:
        return
    is_column = columns < H
    lane = tl.arange(0, BK)
    weights = weight_ptr + (expert * H + columns[None, :]) * SIZE + lane[:, None]
    inputs = inner_ptr + pairs.to(tl.int64)[:, None] * SIZE + lane[None, :]
    result = tl.zeros((BM, BN), tl.float32)
    for k in range(0, SIZE, BK):
        is_in = k + lane < SIZE
        x = tl.load(inputs + k, mask=is_row[:, None] & is_in[None, :], other=0.0)
        result = dot(x, tl.load(weights + k, mask=is_in[:, None] & is_column[None, :], other=0.0), result)
    if bias_ptr is not None:
        result += tl.load(bias_ptr + expert * H + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    if not SCALES_INPUT:
        result *= tl.load(share_ptr + pairs, mask=is_row, other=0.0)[:, None]
    target = out_ptr + pairs.to(tl.int64)[:, None] * H + columns[None, :]
    result = result.to(out_ptr.dtype.element_ty)
    tl.store(target, result, mask=is_row[:, None] & is_column[None, :], eviction_policy=KEPT)


@triton.jit
def combine_kernel(
    pair_ptr, expert_ptr, share_ptr, place_ptr, count_ptr, out_ptr,
    H: tl.constexpr, E: tl.constexpr, EB: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, STRIDE: tl.constexpr,
    IS_WHOLE: tl.constexpr, KEPT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK columns of one token a program: the sum over its pairs."""
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < H
    let_next_start(PDL)
    wait_for_inputs(PDL)
    result = sum_of_pairs(pair_ptr, expert_ptr, share_ptr, place_ptr, row, columns, mask, H, E, K, BLOCK, IS_WHOLE)
    tl.store(out_ptr + row * H + columns, result.to(out_ptr.dtype.element_ty), mask=mask, eviction_policy=KEPT)
    clear_counts(count_ptr, (tl.program_id(0) == 0) & (tl.program_id(1) == 0), E, EB, STRIDE)


@triton.jit(do_not_specialize=["num_pairs"])
def place_kernel(
    expert_ptr, rank_ptr, count_ptr, place_ptr, source_ptr, tile_expert_ptr, tile_rows_ptr, num_tiles_ptr, num_pairs,
    E: tl.constexpr, EB: tl.constexpr, K: tl.constexpr, BM: tl.constexpr, BLOCK: tl.constexpr, STRIDE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK pairs a program: their places in an order by expert, where each expert's begin at a multiple of BM, and the token that is
    at a place. The first E programs say which tiles of BM places are their expert's, and how many places from each tile's first on it
    has. Counts lie STRIDE numbers apart."""
    program = tl.program_id(0)
    bins = tl.arange(0, EB)
    let_next_start(PDL)
    wait_for_inputs(PDL)
    counts = tl.load(count_ptr + bins * STRIDE, mask=bins < E, other=0)
    tiles = (counts + BM - 1) // BM
    before = tl.cumsum(tiles, axis=0) - tiles
    pairs = program * BLOCK + tl.arange(0, BLOCK)
    experts = tl.load(expert_ptr + pairs, mask=pairs < num_pairs, other=E)
    ranks = tl.load(rank_ptr + pairs, mask=pairs < num_pairs, other=0)
    places = tl.gather(before, tl.minimum(experts, EB - 1), axis=0) * BM + ranks
    tl.store(place_ptr + pairs, places, mask=experts < E)
    tl.store(source_ptr + places, pairs // K, mask=experts < E)
    if program == 0:
        tl.store(num_tiles_ptr, tl.sum(tiles, axis=0))
    if program < E:
        first = tl.sum(tl.where(bins == program, before, 0), axis=0)
        count = tl.sum(tl.where(bins == program, counts, 0), axis=0)
        for tile in range(0, (count + BM - 1) // BM):
            tl.store(tile_expert_ptr + first + tile, program)
            tl.store(tile_rows_ptr + first + tile, count - tile * BM)


# Few pairs: by output rows, with no order.


@triton.jit
def few_gate_up_kernel(
    x_ptr, weight_ptr, bias_ptr, expert_ptr, share_ptr, inner_ptr, x_stride,
    E: tl.constexpr, H: tl.constexpr, SIZE: tl.constexpr, K: tl.constexpr, R: tl.constexpr, BK: tl.constexpr,
    ACTIVATION: tl.constexpr, LIMIT: tl.constexpr, SCALES_INPUT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """R rows of gate and of up of one pair's expert a program."""
    pair, rows = tl.program_id(1), tl.program_id(0) * R + tl.arange(0, R)
    lane = tl.arange(0, BK)
    is_row = rows < SIZE
    let_next_start(PDL)
    wait_for_inputs(PDL)
    expert = tl.load(expert_ptr + pair).to(tl.int64)
    if expert >= E:
        return
    gates = weight_ptr + (expert * (2 * SIZE) + rows[:, None]) * H + lane[None, :]
    inputs = x_ptr + (pair // K).to(tl.int64) * x_stride + lane
    gate = tl.zeros((R, BK), tl.float32)
    up = tl.zeros((R, BK), tl.float32)
    for k in range(0, H, BK):
        is_in = k + lane < H
        x = tl.load(inputs + k, mask=is_in, other=0.0).to(tl.float32)
        if SCALES_INPUT:
            x = (x * tl.load(share_ptr + pair)).to(x_ptr.dtype.element_ty).to(tl.float32)
        mask = is_row[:, None] & is_in[None, :]
        gate += tl.load(gates + k, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32) * x[None, :]
        up += (
            tl.load(gates + SIZE * H + k, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
            * x[None, :]
        )
    gate_sum, up_sum = tl.sum(gate, axis=1), tl.sum(up, axis=1)
    if bias_ptr is not None:
        biases = bias_ptr + expert * (2 * SIZE) + rows
        gate_sum += tl.load(biases, mask=is_row, other=0.0).to(tl.float32)
        up_sum += tl.load(biases + SIZE, mask=is_row, other=0.0).to(tl.float32)
    result = gated(gate_sum, up_sum, LIMIT, ACTIVATION, inner_ptr.dtype.element_ty)
    tl.store(inner_ptr + pair.to(tl.int64) * SIZE + rows, result, mask=is_row)


@triton.jit
def few_down_kernel(
    inner_ptr, weight_ptr, bias_ptr, expert_ptr, share_ptr, out_ptr,
    E: tl.constexpr, H: tl.constexpr, SIZE: tl.constexpr, K: tl.constexpr, R: tl.constexpr, BK: tl.constexpr,
    SCALES_INPUT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """R output rows of one token a program, over all of its experts: their weighted sum."""
    token, rows = tl.program_id(1).to(tl.int64), tl.program_id(0) * R + tl.arange(0, R)
    lane = tl.arange(0, BK)
    is_row = rows < H
    let_next_start(PDL)
    wait_for_inputs(PDL)
    total = tl.zeros((R,), tl.float32)
    for j in tl.static_range(K):
        pair = token * K + j
        expert = tl.load(expert_ptr + pair).to(tl.int64)
        if expert < E:
            products = tl.zeros((R, BK), tl.float32)
            for k in range(0, SIZE, BK):
                is_in = k + lane < SIZE
                x = tl.load(inner_ptr + pair * SIZE + k + lane, mask=is_in, other=0.0).to(tl.float32)
                weights = weight_ptr + (expert * H + rows[:, None]) * SIZE + k + lane[None, :]
                weight = tl.load(
                    weights, mask=is_row[:, None] & is_in[None, :], other=0.0, eviction_policy="evict_first"
                )
                products += weight.to(tl.float32) * x[None, :]
            result = tl.sum(products, axis=1)
            if bias_ptr is not None:
                result += tl.load(bias_ptr + expert * H + rows, mask=is_row, other=0.0).to(tl.float32)
            if not SCALES_INPUT:
                result *= tl.load(share_ptr + pair)
            total += result
    tl.store(out_ptr + token * H + rows, total.to(out_ptr.dtype.element_ty), mask=is_row)
