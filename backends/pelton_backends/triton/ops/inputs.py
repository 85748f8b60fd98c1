"""One step's inputs from the batch state, in one launch (decode, drafts) or two (mixed): `prepare_inputs` of Pelton's core.

Math   for row r with slot s = slots[r], context c = num_computed_tokens[s], n = num_scheduled[r]:
         query_start_loc[r + 1] = sum of num_scheduled[0..r];  seq_lens[r] = c + n where n > 0, else 0
       for its i-th token, t = query_start_loc[r] + i, p = c + i:
         positions[t] = p;  input_ids[t] = token_ids[s, min(p, max_model_len)]
         slot_mapping[g][t] = block_tables[g][s, p // B_g] * B_g + p % B_g
       and the first ceil(seq_lens[r] / B_g) blocks of block_tables[g][s], each as the `ratio` kernel blocks it holds.
       Tokens past the last row's: id 0, position 0, slot -1. What lies behind a row's used blocks stays as it was.
Paper  Kwon et al., PagedAttention, SOSP 2023 (arXiv:2309.06180), section 4.3 (block tables).

R rows, T tokens, G KV groups
  slots, num_scheduled      [R]        int64, contiguous
  groups                    [G, 8]     int64: what the kernels know of a group, addresses included, see `_describe`
  token_ids                 [S + 1, W] int32, rows contiguous
  num_computed_tokens       [S + 1]    int64
  query_start_loc, seq_lens [R + 1], [R] int32; input_ids, positions, slot_mapping [T] int64; written

Integers only: equal to the op `reference.prepare_inputs` to the bit. Latency bound: the chain slots -> num_computed_tokens
-> token and block is three dependent loads, so the first 512 blocks of a table are fetched beside the second of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from pelton.attention.metadata import CommonMetadata
from pelton.ops.interface import PrepareInputs, PrepareInputsNeeds, PrepareInputsTensors
from pelton.platform.compiling import launch
from pelton.worker.batch_state import BatchTensors
from pelton.worker.inputs import InputBuffers, StepShape, common_metadata
from pelton_backends.triton.ops.pinned import PinnedMemory, reaches_pinned_memory
from pelton_backends.triton.runtime import has_pdl, launch_options, let_next_start, wait_for_inputs

if TYPE_CHECKING:
    from pelton.ops.speculation import LookupDrafts
    from pelton_backends.triton.ops.drafted_inputs import DraftedInputs

TABLE_BLOCK = 512  # block ids at once: 4 a thread
ROW_BLOCK = 1024
TOKEN_BLOCK = 128
SHORT = 16  # tokens of a row that its own program prepares


@triton.jit
def _write_table(first, source, width, buffer, buffer_stride, row, num_used, ratio, BLOCK: tl.constexpr):
    """A row of a group's table, `source`, into row `row` of its buffer: `num_used` blocks, at least the first. `first`: its first BLOCK.

    A padding row has none: its first block is the padding slot's, 0.
    """
    target = buffer.to(tl.pointer_type(tl.int32)) + row.to(tl.int64) * buffer_stride
    place = tl.arange(0, BLOCK)
    count = tl.minimum(tl.maximum(num_used, 1), width) * ratio
    tl.store(target + place, first * ratio + place % ratio, mask=place < count)
    start = BLOCK
    while start < count:
        at = start + place
        block = tl.load(source + at // ratio, mask=at < count, other=0)
        tl.store(target + at, block * ratio + at % ratio, mask=at < count)
        start += BLOCK


@triton.jit
def tokens_before(first, num_scheduled, end, BLOCK: tl.constexpr):
    """Tokens of the rows up to `end`, itself included. `first`: of the first BLOCK of these."""
    total = tl.sum(first)
    start = BLOCK
    while start <= end:
        other = start + tl.arange(0, BLOCK)
        total += tl.sum(tl.load(num_scheduled + other, mask=other <= end, other=0))
        start += BLOCK
    return total


@triton.jit
def prepare_row(
    row, group, slots, num_scheduled, groups, token_ids, num_computed_tokens, query_start_loc, seq_lens, input_ids, positions,
    token_stride, num_tokens, are_short, ONE_TOKEN: tl.constexpr, HAS_IDS: tl.constexpr, QUERY_BLOCK: tl.constexpr,
    TABLE_BLOCK: tl.constexpr, ROW_BLOCK: tl.constexpr, TOKEN_BLOCK: tl.constexpr,
):  # fmt: skip
    """Prepare what there is once a row of a group. ONE_TOKEN: row r's only token is token r, or padding; tokens too. are_short: no row
    has more than QUERY_BLOCK; tokens too. HAS_IDS: else the rows' token ids are left out. Loads come first: none waits for a store."""
    slot, scheduled = tl.load(slots + row), tl.load(num_scheduled + row)
    other = tl.arange(0, ROW_BLOCK)
    before = tl.load(num_scheduled + other, mask=other <= row, other=0)
    described = groups + group * 8
    table, stride, width = tl.load(described), tl.load(described + 1), tl.load(described + 2).to(tl.int32)
    buffer, buffer_stride, mapping = tl.load(described + 3), tl.load(described + 4), tl.load(described + 5)
    block_size, ratio = tl.load(described + 6), tl.load(described + 7).to(tl.int32)
    mapping = mapping.to(tl.pointer_type(tl.int64))
    context = tl.load(num_computed_tokens + slot)
    source = table.to(tl.pointer_type(tl.int32)) + slot * stride
    entry = tl.arange(0, TABLE_BLOCK)
    first = tl.load(source + entry // ratio, mask=entry < width * ratio, other=0)
    text = token_ids + slot * token_stride
    is_row = scheduled > 0
    seq_len = tl.where(is_row, context + scheduled, 0)
    num_used = tl.cdiv(seq_len, block_size).to(tl.int32)
    if ONE_TOKEN:
        position = tl.where(is_row, context, 0)
        block = tl.load(source + position // block_size).to(tl.int64)
        token = tl.load(text + tl.minimum(position, token_stride - 1), mask=group == 0, other=0)
        total = tokens_before(before, num_scheduled, row, ROW_BLOCK)
        tl.store(mapping + row, tl.where(is_row, block * block_size + position % block_size, -1))
        if group == 0:
            tl.store(input_ids + row, tl.where(is_row, token, 0).to(tl.int64))
            tl.store(positions + row, position)
    else:
        i = tl.arange(0, QUERY_BLOCK)
        position, is_token = context + i, (i < scheduled) & (are_short != 0)
        block = tl.load(source + position // block_size, mask=is_token, other=0).to(tl.int64)
        token = tl.zeros([QUERY_BLOCK], tl.int32)
        if HAS_IDS:
            token = tl.load(text + tl.minimum(position, token_stride - 1), mask=is_token & (group == 0), other=0)
        total = tokens_before(before, num_scheduled, row, ROW_BLOCK)
        place = total - scheduled + i
        tl.store(mapping + place, block * block_size + position % block_size, mask=is_token)
        if group == 0:
            if HAS_IDS:
                tl.store(input_ids + place, token.to(tl.int64), mask=is_token)
            tl.store(positions + place, position, mask=is_token)
        if (row == tl.num_programs(0) - 1) & (are_short != 0):  # what lies behind the last row's
            end = total
            while end < num_tokens:
                behind = end + tl.arange(0, TOKEN_BLOCK)
                is_padding = behind < num_tokens
                nothing = tl.zeros([TOKEN_BLOCK], tl.int64)
                tl.store(mapping + behind, nothing - 1, mask=is_padding)
                if group == 0:
                    tl.store(input_ids + behind, nothing, mask=is_padding)
                    tl.store(positions + behind, nothing, mask=is_padding)
                end += TOKEN_BLOCK
    _write_table(first, source, width, buffer, buffer_stride, row, num_used, ratio, TABLE_BLOCK)
    if group == 0:
        tl.store(seq_lens + row, seq_len.to(tl.int32))
        tl.store(query_start_loc + row + 1, total.to(tl.int32))


@triton.jit(do_not_specialize=["num_tokens", "are_short"])
def _rows_kernel(
    slots,
    num_scheduled,
    groups,
    token_ids,
    num_computed_tokens,
    query_start_loc,
    seq_lens,
    input_ids,
    positions,
    token_stride,
    num_tokens,
    are_short,
    ONE_TOKEN: tl.constexpr,
    QUERY_BLOCK: tl.constexpr,
    TABLE_BLOCK: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    TOKEN_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (R, G), see `prepare_row`."""
    wait_for_inputs(PDL)
    let_next_start(PDL)
    prepare_row(
        tl.program_id(0), tl.program_id(1), slots, num_scheduled, groups, token_ids, num_computed_tokens, query_start_loc, seq_lens,
        input_ids, positions, token_stride, num_tokens, are_short, ONE_TOKEN, True, QUERY_BLOCK, TABLE_BLOCK, ROW_BLOCK, TOKEN_BLOCK,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows", "num_tokens"])
def _tokens_kernel(
    slots,
    groups,
    token_ids,
    num_computed_tokens,
    query_start_loc,
    input_ids,
    positions,
    token_stride,
    num_rows,
    num_tokens,
    SEARCH_STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (ceil(T / BLOCK), G): what there is once a token; after `_rows_kernel`. 2^SEARCH_STEPS > num_rows."""
    group = tl.program_id(1)
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_inside = token < num_tokens
    wait_for_inputs(PDL)
    let_next_start(PDL)
    low = tl.zeros([BLOCK], tl.int32)  # rows that end at or before the token: the token's own row is the next
    high = tl.full([BLOCK], 0, tl.int32) + num_rows
    for _ in tl.static_range(SEARCH_STEPS):
        middle = (low + high) // 2
        ends_before = tl.load(query_start_loc + 1 + middle, mask=middle < num_rows, other=2147483647) <= token
        low = tl.where(ends_before & (low < high), middle + 1, low)
        high = tl.where(ends_before, high, middle)
    is_token = is_inside & (low < num_rows)
    slot = tl.load(slots + low, mask=is_token, other=0)
    start = tl.load(query_start_loc + low, mask=is_token, other=0)
    context = tl.load(num_computed_tokens + slot, mask=is_token, other=0)
    position = tl.where(is_token, context + token - start, 0)
    described = groups + group * 8
    table, stride = tl.load(described).to(tl.pointer_type(tl.int32)), tl.load(described + 1)
    block_size = tl.load(described + 6)
    block = tl.load(table + slot * stride + position // block_size, mask=is_token, other=0).to(tl.int64)
    mapped = tl.where(is_token, block * block_size + position % block_size, -1)
    tl.store(tl.load(described + 5).to(tl.pointer_type(tl.int64)) + token, mapped, mask=is_inside)
    if group == 0:
        known = token_ids + slot * token_stride + tl.minimum(position, token_stride - 1)
        tl.store(input_ids + token, tl.load(known, mask=is_token, other=0).to(tl.int64), mask=is_inside)
        tl.store(positions + token, position, mask=is_inside)


def _describe(state: BatchTensors, buffers: InputBuffers) -> Tensor:
    """[G, 8]: address, row stride and width of the state's table; address and row stride of the buffer; address of
    the slot mapping; tokens of a block; kernel blocks of a block. Addresses do not change, so a graph may hold this."""
    rows = [
        [
            table.data_ptr(), table.stride(0), table.shape[1],
            buffer.data_ptr(), buffer.stride(0), slot_mapping.data_ptr(), block_size, ratio,
        ]
        for table, buffer, slot_mapping, block_size, ratio in zip(
            state.block_tables, buffers.block_tables, buffers.slot_mapping, state.block_sizes,
            buffers.blocks_per_block, strict=True,
        )
    ]  # fmt: skip
    return torch.tensor(rows, dtype=torch.int64, device=state.device)


class _Prepare:
    def __init__(self, needs: PrepareInputsNeeds, tensors: PrepareInputsTensors) -> None:
        self._state, self._buffers = tensors.state, tensors.buffers
        self._groups = _describe(tensors.state, tensors.buffers)
        self._pdl = has_pdl(tensors.state.device)
        self._search_steps = needs.max_num_seqs.bit_length()
        self._ahead: DraftedInputs | None = None  # drafts that the next call looks up

    def __call__(self, slots: Tensor, num_scheduled: Tensor, shape: StepShape) -> list[CommonMetadata]:
        state, buffers, groups, pdl = self._state, self._buffers, self._groups, self._pdl
        num_groups, options = groups.shape[0], launch_options(pdl)
        num_rows, num_tokens = shape.num_padded_reqs, shape.num_padded_tokens
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead.prepare(slots, num_scheduled, groups, state, buffers, shape):
            return [common_metadata(state, buffers, group, shape) for group in range(num_groups)]
        one_token = shape.max_query_len == 1 and num_rows == num_tokens
        are_short = num_rows > 0 and shape.max_query_len <= SHORT
        if num_rows:
            launch(
                _rows_kernel, (num_rows, num_groups),
                slots, num_scheduled, groups, state.token_ids, state.num_computed_tokens,
                buffers.query_start_loc, buffers.seq_lens, buffers.input_ids, buffers.positions,
                state.token_ids.stride(0), num_tokens,
                int(are_short), ONE_TOKEN=one_token, QUERY_BLOCK=SHORT, TABLE_BLOCK=TABLE_BLOCK, ROW_BLOCK=ROW_BLOCK,
                TOKEN_BLOCK=TOKEN_BLOCK, PDL=pdl, num_warps=4, **options,
            )  # fmt: skip
        if num_tokens and not (one_token or are_short):
            launch(
                _tokens_kernel, (triton.cdiv(num_tokens, TOKEN_BLOCK), num_groups),
                slots, groups, state.token_ids, state.num_computed_tokens, buffers.query_start_loc,
                buffers.input_ids, buffers.positions, state.token_ids.stride(0), num_rows, num_tokens,
                SEARCH_STEPS=self._search_steps, BLOCK=TOKEN_BLOCK, PDL=pdl, num_warps=4, **options,
            )  # fmt: skip
        return [common_metadata(state, buffers, group, shape) for group in range(num_groups)]

    def look_up_too(self, look_up: LookupDrafts, slots: Tensor, num_draft: Tensor, num_found: Tensor) -> bool:
        """Have the next call look these drafts up first: in the same launch, where its rows are these. False: another op's."""
        from pelton_backends.triton.ops.drafted_inputs import DraftedInputs

        self._ahead = DraftedInputs.of(look_up, slots, num_draft, num_found)
        return self._ahead is not None


class _PinnedPrepare(_Prepare):
    """Steps read pinned memory themselves."""

    def __init__(self, needs: PrepareInputsNeeds, tensors: PrepareInputsTensors) -> None:
        super().__init__(needs, tensors)
        pinned = PinnedMemory(self._groups)
        self.take, self.give = pinned.take, pinned.give


class TritonPrepareInputs:
    """`prepare_inputs` for any step; a step of few tokens a row takes one launch, any other two."""

    @staticmethod
    def unsupported(needs: PrepareInputsNeeds) -> list[str]:
        return []

    @staticmethod
    def bind(needs: PrepareInputsNeeds, tensors: PrepareInputsTensors) -> PrepareInputs:
        return (_PinnedPrepare if reaches_pinned_memory(tensors.state.device) else _Prepare)(needs, tensors)
