"""Decode attention by as many programs as run at once, for Hopper: 12 rows of 8 kv heads and more, 8 of them with drafts.

Where pairs of row and kv head are about as many as programs that have room, each program has a pair: nothing is brought together, and
its first keys are on their way before the kernel before it has ended. What programs have on its way fills a multiprocessor's shared
memory, so that none takes more of them than its share. More rows, and rows of which one is much longer than the others, are shared out
evenly instead: all rows' chunks on one line, cut into as many pieces as there are programs. `deal_resident_kernel` says which, once a step.

The kernel is in `decode_resident_kernel.py`; other devices, heads and kinds of attention keep `decode.py` and `decode_drafts.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from pelton_backends.triton.attention.decode_resident_kernel import HEAD_DIM, LEVELS, SHARE, resident_decode_kernel
from pelton_backends.triton.launch import Launcher, Variant, alignment
from pelton_backends.triton.runtime import launch_options, let_next_start, num_sms, wait_for_inputs

if TYPE_CHECKING:
    from torch import Tensor

    from pelton.attention.interface import AttentionParams
    from pelton_backends.triton.attention.decode import NormRope

BLOCK_SIZE = 16
COLUMNS, _NARROW = 16, 8  # of the kernel's tile: query heads of a kv head, of all tokens of a row
_FEWEST, _FEWEST_WITH_DRAFTS, _FEWEST_WIDE = 96, 64, 129  # pairs of row and kv head; see `resident_shape`
_FEW_KV_HEADS = 4
_START = 2  # chunks' worth of time that the start of a row costs
_SHARE = tl.constexpr(SHARE)


@triton.jit(do_not_specialize=["num_rows", "uneven", "short", "start"])
def deal_resident_kernel(
    seq_lens,
    query_start_loc,
    block_table,
    shares,
    stride_table,
    num_rows,
    uneven,
    short,
    start,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program p writes shares[p], see `decode_resident_kernel.SHARE`. Arguments: see `deal_resident`.

    Even shares: row r is, on a line, an empty place for its start and then its chunks; program p has the p-th piece of the line.
    """
    wait_for_inputs(PDL)
    let_next_start(PDL)
    program, programs = tl.program_id(0), tl.num_programs(0)
    rows = tl.arange(0, ROWS)
    is_row = rows < num_rows
    lengths = tl.load(seq_lens + rows, mask=is_row, other=0)
    keys = lengths - 1
    if query_start_loc is not None:
        starts = tl.load(query_start_loc + rows, mask=is_row, other=0)
        num_tokens = tl.load(query_start_loc + rows + 1, mask=is_row, other=0) - starts
        keys = tl.where((lengths > 0) & (num_tokens > 0), lengths - num_tokens, -1)
    chunks = tl.where(keys >= 0, tl.maximum((keys + CHUNK - 1) // CHUNK, 1), 0)
    longest = tl.max(chunks, 0)
    places = tl.where(keys >= 0, chunks + start, 0)
    ends = tl.cumsum(places, 0)
    begins = ends - places
    line = tl.sum(places, 0)
    piece = tl.maximum((line + programs - 1) // programs, 1)
    is_whole = (num_rows <= programs) & ((longest <= uneven * piece) | (longest <= short // CHUNK))
    if is_whole:
        first_row, first_chunk, last_row = program, 0, program
        end_chunk = tl.sum(tl.where(rows == program, chunks, 0), 0)
        last_row = tl.where(end_chunk > 0, program, -1)
        programs_0, parts_0, programs_1, parts_1 = program, 1, program, 1
    else:
        begin, end = program * piece, tl.minimum((program + 1) * piece, line)
        # A cut within a row's empty place comes before its first chunk: the row is whole for the programs behind it.
        first_row = tl.sum((is_row & (ends <= begin)).to(tl.int32), 0)
        last_row = tl.sum((is_row & (ends <= end)).to(tl.int32), 0)
        first_chunk = tl.maximum(begin - tl.sum(tl.where(rows == first_row, begins, 0), 0) - start, 0)
        end_chunk = tl.where(last_row < num_rows, end - tl.sum(tl.where(rows == last_row, begins, 0), 0) - start, 0)
        is_before = end_chunk <= 0
        last_row = tl.where(is_before, last_row - 1, last_row)
        end_chunk = tl.where(is_before, tl.sum(tl.where(rows == last_row, chunks, 0), 0), end_chunk)
        last_row = tl.where(begin >= line, -1, last_row)
        # A cut within its chunks gives a row one more program. Cuts are at multiples of `piece`.
        of_begin, of_end = (begins + start) // piece, tl.maximum(ends - 1, 0) // piece
        programs_0 = tl.sum(tl.where(rows == first_row, of_begin, 0), 0)
        parts_0 = tl.sum(tl.where(rows == first_row, of_end - of_begin + 1, 0), 0)
        programs_1 = tl.sum(tl.where(rows == last_row, of_begin, 0), 0)
        parts_1 = tl.sum(tl.where(rows == last_row, of_end - of_begin + 1, 0), 0)
    share = shares + program * _SHARE
    tl.store(share, first_row)
    tl.store(share + 1, first_chunk)
    tl.store(share + 2, last_row)
    tl.store(share + 3, end_chunk)
    tl.store(share + 4, programs_0)
    tl.store(share + 5, parts_0)
    tl.store(share + 6, programs_1)
    tl.store(share + 7, parts_1)
    first_keys = tl.sum(tl.where(rows == first_row, keys, 0), 0)
    tl.store(share + 8, first_keys)
    entry = tl.arange(0, 16)
    at = first_chunk * (CHUNK // 16) + entry
    is_entry = (at * 16 < first_keys) & (at < stride_table) & (last_row >= first_row)
    block = tl.load(block_table + first_row.to(tl.int64) * stride_table + at, mask=is_entry, other=0)
    tl.store(share + 16 + entry, block)


_launch_deal, _launch = Launcher(deal_resident_kernel), Launcher(resident_decode_kernel)


@dataclass(frozen=True, slots=True)
class ResidentShape:
    """How one launch shares out its work; a function of shapes alone."""

    programs: int  # of a kv head
    warps: int
    pieces: int  # of 16 keys, that a warp takes at a time
    buffers: int  # of chunks, in shared memory
    uneven: int = 4
    short: int = 512
    """A row that is longer than so many even shares, and than so many tokens, is more than one program should have."""
    is_ahead: bool = False
    """Programs have several rows, and read what the next one's start needs in time. Rows have one token."""

    @property
    def chunk(self) -> int:
        """Keys that a program takes at a time."""
        return 16 * self.warps * self.pieces


def resident_shape(num_rows: int, num_kv_heads: int, group: int, num_tokens: int, num_sms: int) -> ResidentShape | None:
    """None: the step is for other kernels.

    Two or four programs have room on a multiprocessor, with 128 or 192 KiB of copies on their way in all. On an H200, between QKV's and
    O's products, with heads of 128: 32 rows of 256 tokens and 8 kv heads 10.5 us for 11.7, with three drafts each 11.9 for 14.3; 128 rows
    of 150 and 250 tokens and 4 kv heads 12.8 and 17.9 for 16.5 and 22.6; groups of 8 are not cut, 200 tokens 15.4 for 21.2.

    That was with two warps a program, of 32 keys each. Four of 16 keys take less at every length tried, see docs/performance/gpu.md, and
    so do two chunks on their way for three: whole steps of Qwen3-0.6B with 32 rows of 256 tokens 841.6 us for 867.8, 100 to 400 tokens
    838 for 850, 1,000 and 2,000 tokens and log-normal lengths within 0.3 %; of Llama-3.1-8B 4,167 for 4,207, of Qwen3-30B-A3B with 40 and
    64 rows within 0.2 %. More than 8 columns (the 8B with three drafts, 32 rows) are two tiles of the products: 12.8 us for 23.1 of
    `drafts_kernel` at 256 tokens, 20.2 at 512; of 12 and 16 rows they gain 0.6 % of a step at most, and other lengths were not measured.

    96 to 132 pairs have a multiprocessor each, and 128 keys at a time. Whole steps of eight layers, us less than by `decode_kernel`: 32
    rows of 4 kv heads 27, 19 and 32 of 712, 735 and 925 (150, 400 and 2,000 tokens), 9 to 20 where lengths differ, 24 rows 14 to 24; 16
    rows of 8 kv heads (the 8B) 14 to 32 of 1,213 to 1,428. Of the 0.6B's 28 layers, equal lengths, 26 to 53 of 736 to 1,507; log-normal
    lengths +6 of 857, one of 2,000 tokens among 150 +19 of 807. Steps of one row are 1 to 17 % slower so. With three drafts a row, where
    `drafts_kernel` was before, whole steps of the 0.6B at 256 and 1,000 tokens: 16 rows 880 and 1,162 us for 1,007 and 1,304, 12 rows 869
    and 1,111 for 977 and 1,219, 8 rows 744 and 982 for 851 and 1,054; fewer were not measured.

    More rows share two programs a multiprocessor evenly, whatever their lengths, and each program reads what its next row's start needs
    while it has the row before. Whole steps, us, by `decode_kernel` and so (lengths from a quarter to 7 quarters of the mean where it says
    uneven), 8 kv heads:

    | rows x tokens     | Qwen3-0.6B   | Llama-3.1-8B   |
    | 48 x 280          | 1,220; 1,181 | 4,731; 4,675   |
    | 64 x 280          | 1,351; 1,203 | 4,868; 4,747   |
    | 64 x 580, uneven  | 1,857; 1,786 | 5,470; 5,406   |
    | 128 x 150         | 1,427; 1,400 | 5,630; 5,716   |
    | 128 x 280         | 1,865; 1,794 | 6,115; 6,149   |
    | 128 x 560         | 2,885; 2,784 | 7,557; 7,102   |
    | 256 x 280         | 3,371; 3,253 | 10,202; 10,149 |
    | 256 x 570, uneven | 5,357; 5,124 | 12,513; 12,196 |

    With three drafts a row, by `drafts_kernel` and so: the 0.6B 48 and 64 rows of 280 tokens 1,642 and 1,613, 1,955 and 1,733, 128 rows
    3,142 and 3,009, 64 uneven ones of 580 2,489 and 2,274; the 8B 7,231 and 6,991, 9,027 and 8,530, the uneven ones 9,799 and 9,190.

    Groups of 9 to 16 heads are two tiles of the products, too. Attention alone of the 8B with 2 kv heads: 128 x 280 13.2 us for 23.9 of
    `decode_kernel`, 128 x 560 uneven 23.9 for 46.3, 256 x 560 39.9 for 79.3 (14.3, 26.4, 41.7 where the next row's start is read early).

    Of Qwen3-30B-A3B (4 kv heads, groups of 8) 256 rows of 280 tokens 20,124 and 19,247, of 560 22,222 and 20,881. Attention alone in a
    chain, 256 x 560 there: 102.6 and 75.0, where keys and values take 68.3 of copy bandwidth. Four programs of one warp are faster for
    short rows (8B, 128 x 150 5,594, 128 x 280 6,061) and slower for long or uneven ones (256 x 570 uneven 12,385; of the 0.6B 40 x 280
    1,075 for 1,120, 40 x 540 uneven 1,525 for 1,387). A third chunk on its way gains up to 2 % in the chain and loses in steps (0.6B,
    128 x 150 1,551).
    """
    columns, pairs = group * num_tokens, num_rows * num_kv_heads
    is_narrow = columns <= _NARROW
    fewest = _FEWEST_WIDE if not is_narrow else _FEWEST if num_tokens == 1 else _FEWEST_WITH_DRAFTS
    if columns > COLUMNS or pairs < fewest:
        return None
    if num_rows <= num_sms // num_kv_heads:
        return ResidentShape(num_sms // num_kv_heads, warps=4, pieces=2, buffers=3, uneven=2, short=256)
    if num_rows <= 2 * num_sms // num_kv_heads:
        return ResidentShape(2 * num_sms // num_kv_heads, warps=4, pieces=1, buffers=2)
    if num_rows <= 4 * num_sms // num_kv_heads and num_kv_heads <= _FEW_KV_HEADS and num_tokens == 1 and is_narrow:
        return ResidentShape(4 * num_sms // num_kv_heads, warps=1, pieces=2, buffers=3)
    return ResidentShape(
        2 * num_sms // num_kv_heads, warps=4, pieces=1, buffers=2, is_ahead=num_tokens == 1 and is_narrow
    )


@dataclass(slots=True)
class ResidentParts:
    """Where programs leave parts of a row, and what they read first; shared by all launches of one stream. `arrivals` is zero between
    launches."""

    sums: Tensor  # [places, COLUMNS * HEAD_DIM] float32
    stats: Tensor  # [places, 2 * COLUMNS] float32
    arrivals: Tensor  # [places, LEVELS] int32
    shares: Tensor  # [programs, SHARE] int32, of `deal_resident`

    @staticmethod
    def allocate(device: torch.device) -> ResidentParts:
        programs = 4 * num_sms(device)
        return ResidentParts(
            torch.empty(2 * programs, COLUMNS * HEAD_DIM, dtype=torch.float32, device=device),
            torch.empty(2 * programs, 2 * COLUMNS, dtype=torch.float32, device=device),
            torch.zeros(2 * programs, LEVELS, dtype=torch.int32, device=device),
            torch.zeros(programs, SHARE, dtype=torch.int32, device=device),
        )


def deal_resident(
    seq_lens: Tensor,
    block_table: Tensor,
    shares: Tensor,
    shape: ResidentShape,
    *,
    num_rows: int,
    query_start_loc: Tensor | None = None,
    pdl: bool = False,
) -> None:
    """Into `shares`: what each program of a kv head has. Once for all layers of a step.

    seq_lens [R] int32, 0 of padding; block_table [R, B] int32, strides (any, 1); query_start_loc [R + 1] int32 of rows with drafts.
    """
    assert shape.programs <= shares.shape[0]
    constants = {
        "ROWS": triton.next_power_of_2(num_rows), "CHUNK": shape.chunk, "PDL": pdl,
    }  # fmt: skip
    key = (
        *constants.values(), seq_lens.device, query_start_loc is None, block_table.stride(0),
        alignment(seq_lens, query_start_loc, block_table, shares),
    )  # fmt: skip
    arguments = (
        seq_lens, query_start_loc, block_table, shares, block_table.stride(0), num_rows, shape.uneven, shape.short, _START,
    )  # fmt: skip
    num_warps = 1 if num_rows <= 256 else 4
    _launch_deal(key, (shape.programs,), arguments, constants, num_warps=num_warps, **launch_options(pdl))


class ResidentDecode:
    """Attention of one layer's rows from QKV's rows on, with the norm, the rotation and the cache's new entries.

    Math and roundings as for `decode_attention` and, with drafts, `drafts_attention`, without window, cap, sinks and ALiBi. R rows of
    1 to `num_tokens` tokens (0: padding), T tokens in all, H heads, N kv heads, D = 128:
      query            [T, (H + 2 N) D], strides (any, 1); fp16 or bf16
      k_cache, v_cache [P, 16, N, D] of its dtype, strides (any, D, any, 1)
      output           [T, H, D], strides (any, D, 1)
    """

    @staticmethod
    def serves(layer: AttentionParams) -> bool:
        """Return whether it can, on Hopper; `resident_shape` says in which steps."""
        needs, cache, strides = layer.needs, layer.k_cache, layer.k_cache.stride()
        return (
            layer.sinks is None and layer.alibi_slopes is None and layer.soft_cap is None and not needs.is_local
            and needs.dtype in ("float16", "bfloat16") and cache.dtype == getattr(torch, needs.dtype)
            and (cache.shape[1], cache.shape[3]) == (BLOCK_SIZE, HEAD_DIM) and strides[1] == HEAD_DIM
            and strides[0] % 16 == strides[2] % 16 == cache.data_ptr() % 16 == 0
        )  # fmt: skip

    def __init__(
        self,
        layer: AttentionParams,
        parts: ResidentParts,
        norm_rope: NormRope,
        *,
        num_tokens: int = 1,
        pdl: bool = False,
    ) -> None:
        """num_tokens: of a row, at most."""
        k_cache, num_kv_heads = layer.k_cache, layer.k_cache.shape[2]
        group, spec = layer.num_heads // num_kv_heads, norm_rope.norm_spec
        self._num_kv_heads, self._scale, self._shares = num_kv_heads, layer.scale, parts.shares
        self._caches = k_cache, layer.v_cache
        self._last = norm_rope.cos_sin, norm_rope.q_norm, norm_rope.k_norm, parts.sums, parts.stats, parts.arrivals
        self._strides = k_cache.stride(0), k_cache.stride(2)
        self._constants: dict[str, Any] = {
            "EPS": spec.eps if spec else None, "UNIT_OFFSET": spec.unit_offset if spec else False, "BLOCK_SIZE": BLOCK_SIZE,
            "ROTARY_DIM": norm_rope.rotary_dim, "NUM_KV_HEADS": num_kv_heads, "GROUP": group, "TOKENS": num_tokens,
            "M": _NARROW if group * num_tokens <= _NARROW else COLUMNS, "PDL": pdl,
        }  # fmt: skip
        self._key = k_cache.dtype, k_cache.device, self._strides, alignment(*self._caches, self._shares, *self._last)
        self._options = launch_options(pdl)
        self._variants: dict[tuple[ResidentShape, bool], Variant] = {}

    def __call__(
        self,
        query: Tensor,
        output: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        query_start_loc: Tensor | None,
        seq_lens: Tensor,
        block_table: Tensor,
        shape: ResidentShape,
        *,
        is_settled: bool = True,
    ) -> None:
        """`deal_resident` has dealt this step's rows out. is_settled: as for `decode_attention`."""
        variant = self._variants.get((shape, is_settled))
        if variant is None:
            assert 2 * shape.programs * self._num_kv_heads <= len(self._last[3]), "places for parts"
            constants = {
                **self._constants, "W": shape.warps, "J": shape.pieces, "BUFFERS": shape.buffers, "IS_EARLY": is_settled,
                "IS_AHEAD": shape.is_ahead,
            }  # fmt: skip
            variant = _launch.variant(self._key, constants, num_warps=shape.warps, **self._options)
            self._variants[shape, is_settled] = variant
        strides = query.stride(0), output.stride(0), block_table.stride(0)
        key = (
            strides, query_start_loc is None,
            alignment(query, positions, slot_mapping, output, query_start_loc, seq_lens, block_table),
        )  # fmt: skip
        arguments = (
            query, positions, slot_mapping, *self._caches, output, query_start_loc, seq_lens, block_table, self._shares, *self._last,
            *strides, *self._strides, self._scale,
        )  # fmt: skip
        variant(key, (self._num_kv_heads, shape.programs), arguments)
