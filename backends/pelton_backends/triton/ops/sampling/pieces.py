"""Common parts of the sampling kernels: order of floats, random numbers, the end of a row, picking by one number.

Values are compared by integer keys that have the floats' order: NaN above everything, -0 equal to 0.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pelton.sampling import side_tables
from pelton_backends.triton.runtime import INTERPRETED

_INTERPRETED = tl.constexpr(INTERPRETED)
GROUP = tl.constexpr(side_tables.GROUP)  # tokens of a group: one line of 128 B
LOG2_E = tl.constexpr(1.4426950408889634)
LOWEST_KEY = tl.constexpr(-2147483648)  # below every float's key
MINUS_INF_KEY = tl.constexpr(-2139095041)
INF_KEY = tl.constexpr(2139095040)

OK = tl.constexpr(0)  # as in pelton_platforms.device.sampling.sampler
NOT_FINITE = tl.constexpr(1)
NOTHING_ALLOWED = tl.constexpr(2)


@triton.jit
def order_key(x):
    """float32 -> int32, of the same order."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(x != x, 0x7FFFFFFF, key)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def group_keys(values):
    """values [G, 32] float32 -> the key of each group's largest [G]: keys only of these, not of every token."""
    if _INTERPRETED:  # which takes a reduction of our own one by one
        return tl.max(order_key(values), 1)
    return order_key(tl.reduce(values, 1, _larger))


@triton.jit
def key_value(key):
    """The float32 of a key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def exp_sum(values, best, scale):
    """values [G, 32], best: key of the largest -> the sum of 2^((value - largest) * scale), float64."""
    top = tl.where(best <= MINUS_INF_KEY, 0.0, key_value(best))
    return tl.sum(tl.sum(tl.exp2((values - top) * scale), 1).to(tl.float64), 0)


@triton.jit
def _mix(value):
    """splitmix64's (Steele, Lea, Flood, OOPSLA 2014), on int64 as pelton_platforms.device.sampling.random has it."""
    value = (value ^ ((value >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    value = (value ^ ((value >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return value ^ ((value >> 31) & 0x1FFFFFFFF)


@triton.jit
def uniform(seed, position):
    """int64, int64 -> float64 in (0, 1): the number of `pelton_platforms.device.sampling.random.uniform`, to the bit."""
    bits = _mix(_mix(seed - 7046029254386353131) ^ _mix(position * -7046029254386353131 - 4658895280553007687))
    return (((bits >> 16) & 0xFFFFFFFFFFFF).to(tl.float64) + 0.5) * 3.552713678800501e-15


@triton.jit
def finish_row(
    row, slot, token, code, result, token_ids, token_stride, num_computed_tokens, side_slots, counts, touched, V
):
    """Write a row's result and advance its request; `counts` of a side row takes the token."""
    position = tl.load(num_computed_tokens + slot) + 1
    tl.store(result + 2 * row, token)
    tl.store(result + 2 * row + 1, code)
    tl.store(token_ids + slot * token_stride + tl.minimum(position, token_stride - 1), token)
    tl.store(num_computed_tokens + slot, position)
    side_slot = tl.load(side_slots + slot)
    if side_slot >= 0:
        counted = counts + side_slot * V + token
        tl.store(counted, tl.load(counted) + 1)
        tl.store(touched + side_slot * ((V + GROUP - 1) // GROUP) + token // GROUP, 1)


@triton.jit
def pick_chunk(sums, number, CHUNKS: tl.constexpr):
    """sums [CHUNKS] float64 -> (chunk in which the running sum passes number * total, what is left of it there)."""
    place = tl.arange(0, CHUNKS)
    running = tl.cumsum(sums, 0)
    target = number * tl.max(running, 0)
    chunk = tl.sum((running <= target).to(tl.int32), 0)
    chunk = tl.minimum(chunk, tl.max(tl.where(sums > 0, place, 0), 0))
    return chunk, target - tl.max(tl.where(place < chunk, running, 0.0), 0)


@triton.jit
def pick_token(weights, ids, target, GROUPS: tl.constexpr, GROUP_SIZE: tl.constexpr):
    """weights [GROUPS, GROUP_SIZE] float32, groups in the order of tokens; ids [GROUPS] of the groups -> token.

    The first token at which the running sum is above `target`; never one of weight 0, unless all are. Float64, but for
    the sums of groups: converting every weight costs 0.3 us a row (H200).
    """
    sums = tl.sum(weights, 1).to(tl.float64)
    place = tl.arange(0, GROUPS)
    running = tl.cumsum(sums, 0)
    row = tl.sum((running <= target).to(tl.int32), 0)
    row = tl.minimum(row, tl.max(tl.where(sums > 0, place, 0), 0))
    left = target - tl.max(tl.where(place < row, running, 0.0), 0)
    is_row = place == row
    inside = tl.sum(tl.where(is_row[:, None], weights, 0.0), 0).to(tl.float64)
    lane = tl.arange(0, GROUP_SIZE)
    column = tl.sum((tl.cumsum(inside, 0) <= left).to(tl.int32), 0)
    column = tl.minimum(column, tl.max(tl.where(inside > 0, lane, 0), 0))
    return tl.sum(tl.where(is_row, ids, 0), 0) * GROUP_SIZE + column
