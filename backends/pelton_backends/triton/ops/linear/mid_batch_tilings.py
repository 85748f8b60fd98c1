"""Which products `hopper_mid_batch` multiplies, and how it cuts them."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import triton

from pelton_backends.triton.ops.linear.hopper_split_k import LONG_ROW, LONG_ROW_OF_RANKS, PANEL_BYTES, PROGRAMS

GROUP = 64  # rows of x of a warp group
MIN_PROGRAMS = 96
SMALL_MATRIX = 8 * 2**20  # numbers
LARGE_E4M3_MATRIX = 56 * 2**20
LONG_ROW_OF_SMALL = 4096


class MidBatchTiling(NamedTuple):
    """A program's work: `run` rows of the weight, of them `rows` and then the rest, by 64 `groups` of x, over a `split`-th of K,
    through `stages` buffers of 128 bytes of each row of both. `registers`: of a thread on average, those that copy and the idle ones beside
    them included; 0: all that a multiprocessor has."""

    run: int
    rows: int
    groups: int
    split: int
    stages: int
    registers: int = 0


def even_run(num_rows: int, programs: int, unit: int = 32) -> int:
    """The least multiple of `unit` that cuts num_rows into no more runs than there are programs."""
    return -(-num_rows // (unit * programs)) * unit


@cache
def choose_mid_batch_tiling(
    num_tokens: int, out_features: int, in_features: int, is_gated: bool
) -> MidBatchTiling | None:
    """Choose as measured on an H200 (132 multiprocessors), bf16, 65 to 256 rows of Qwen3-0.6B's and Llama-3.1-8B's matrices: see
    docs/performance.md. None where the kernels of `small_batch` or cuBLAS were as fast in a chain of a layer's products.

    cuBLAS has tiles for any number of rows of x, so it is ahead where those here are half empty: between 129 and 184, and
    between 193 and 224 rows of wide matrices. Tiles of 64 rows of the weight by 128 of x, as fast or faster alone for O and
    down, made the chain 4 to 6 % slower at 208 and 224 rows and are not used: they read more from L2, under a power limit.

    Up to 128 rows a layer of the 8B's products takes 135.6 us with gate and up in runs of 224 rows and down in halves of K by 64 rows, for
    136.9 with `HopperProduct`; of half of it, as each of two ranks has, 77.4 for 84.9, gate and up in runs of 112.

    O of Qwen3-30B-A3B (2,048 x 4,096), in a chain with QKV: 128 rows 20.3 us in tiles of 64 rows of the weight by quarters of K, for 21.0
    with `HopperProduct`; 256 rows 25.3 in tiles of 64 by 64, for 26.2, but 192 rows 25.2 for 24.9.

    Up to 128 rows gate and up of the 0.6B are cut into 128 programs of 96 rows of the weight and 64 of x: 7.6 us with the norm, for
    8.0 in 96 programs of `HopperProduct`."""
    if not 64 < num_tokens <= 256:
        return None
    is_small = out_features * in_features <= SMALL_MATRIX
    if is_small and not is_gated and in_features >= LONG_ROW_OF_SMALL:
        return _small_tiling(num_tokens, out_features, in_features)
    if num_tokens <= 128:
        if is_gated:
            return _few_gated_tiling(out_features, in_features, is_small)
        return None if is_small else _few_tiling(out_features, in_features)
    if is_gated:
        if out_features % 16 or (not is_small and (num_tokens <= 184 or 192 < num_tokens <= 224)):
            return None
        num_blocks = 1 if not is_small and num_tokens <= 192 else 2
        run = even_run(out_features, PROGRAMS // num_blocks)
        if triton.cdiv(out_features, run) * num_blocks < MIN_PROGRAMS:
            return None
        return _tiling(run, 128, 3, 1, in_features) if num_blocks == 1 else _tiling(run, 256, 2, 1, in_features)
    is_cut_evenly = MIN_PROGRAMS <= triton.cdiv(out_features, 128) * 4 <= PROGRAMS
    if is_small or in_features < LONG_ROW or not 176 < num_tokens <= 192 or not is_cut_evenly:
        return None
    return _tiling(128, 128, 3, 4, in_features)


def _few_gated_tiling(out_features: int, in_features: int, is_small: bool) -> MidBatchTiling | None:
    """For 65 to 128 rows: of a small matrix where runs are of 96 rows, of a large one where runs of 112 and more make a program each."""
    if out_features % 16 or in_features % (PANEL_BYTES // 2):
        return None
    if not is_small:
        run = even_run(out_features, PROGRAMS, 16)
        is_full = 112 <= run <= 256 and run.bit_count() <= 3 and triton.cdiv(out_features, run) >= MIN_PROGRAMS
        return _tiling(run, 256, 2, 1, in_features) if is_full else None
    if even_run(out_features, PROGRAMS // 2) != 96 or triton.cdiv(out_features, 96) * 2 < MIN_PROGRAMS:
        return None
    return MidBatchTiling(96, 96, 1, 1, 9, 128)


def _small_tiling(num_tokens: int, out_features: int, in_features: int) -> MidBatchTiling | None:
    """For a small matrix with long rows that 64 rows of the weight cut into a quarter of the programs."""
    is_full = MIN_PROGRAMS <= triton.cdiv(out_features, 64) * 4 <= PROGRAMS
    if not is_full or out_features % 64 or in_features % (PANEL_BYTES // 2 * 4):
        return None
    if num_tokens <= 128:
        return MidBatchTiling(64, 64, 2, 4, 9, 72)
    return MidBatchTiling(64, 64, 1, 1, 9, 128) if num_tokens > 192 else None


def _few_tiling(out_features: int, in_features: int) -> MidBatchTiling | None:
    """For 65 to 128 rows of a large matrix with long rows, where tiles of 64 rows of the weight, each by two programs, fill the device."""
    if in_features < LONG_ROW_OF_RANKS or in_features % PANEL_BYTES:
        return None
    is_full = MIN_PROGRAMS <= triton.cdiv(out_features, 64) * 2 <= PROGRAMS
    return MidBatchTiling(64, 64, 2, 2, 9, 72) if is_full else None


@cache
def choose_e4m3_tiling(num_tokens: int, out_features: int, in_features: int, is_gated: bool) -> MidBatchTiling | None:
    """The same for float8_e4m3fn, as measured with 96 and 128 rows of Llama-3.1-8B's matrices: see docs/performance/models.md. None:
    `HopperProduct`, which computes tiles of 128 rows for 65 and more, too.

    Down has a program for each 64 rows of the weight and 64 of x. Programs of all rows and half of K take a quarter less from L2, and
    are slower, as they add their parts: 0.3 us at 128 rows and 0.8 at 96 of a chain's 82.9 and 80.8 a layer."""
    if not 64 < num_tokens <= 128 or out_features * in_features < LARGE_E4M3_MATRIX:
        return None
    if is_gated:
        run = even_run(out_features, PROGRAMS)
        if out_features % 16 or triton.cdiv(out_features, run) < MIN_PROGRAMS:
            return None
        return _tiling(run, 256, 2, 1, in_features, 1) if run <= 256 else None
    is_full = MIN_PROGRAMS <= triton.cdiv(out_features, 64) * 2 <= PROGRAMS
    if in_features < LONG_ROW or in_features % PANEL_BYTES or not is_full:
        return None
    return MidBatchTiling(64, 64, 1, 1, 9, 128)


def _tiling(
    run: int, most: int, groups: int, split: int, in_features: int, element_size: int = 2
) -> MidBatchTiling | None:
    """With the run in one or two equal parts of at most `most` rows, and all of the memory as buffers."""
    rows = run if run <= most else triton.cdiv(run, 64) * 32
    if rows > most or in_features % (PANEL_BYTES // element_size * split):
        return None
    stages = min(225_000 // ((triton.next_power_of_2(rows) + groups * GROUP) * PANEL_BYTES), 8)
    return MidBatchTiling(run, rows, groups, split, stages)
