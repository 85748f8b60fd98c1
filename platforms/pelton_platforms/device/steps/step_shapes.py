"""Shapes of steps without requests, and metadata of steps without a cache."""

from __future__ import annotations

from pelton.attention.metadata import CommonMetadata
from pelton.worker.inputs import InputBuffers, StepShape


def padding_shape(num_tokens: int, max_seq_len: int, num_decode_rows: int = 0) -> StepShape:
    """The shape of a step of nothing but padding: `num_decode_rows` of one token, and a row of `num_tokens` of a sequence of up to
    `max_seq_len`. That row is a decode step's where it has one token."""
    num_rows = num_decode_rows + 1
    return StepShape(
        num_reqs=num_rows, num_tokens=0, num_decode_rows=num_rows if num_tokens == 1 else num_decode_rows,
        max_query_len=num_tokens, max_seq_len=max_seq_len,
        num_padded_reqs=num_rows, num_padded_tokens=num_decode_rows + num_tokens,
    )  # fmt: skip


def uncached_metadata(buffers: InputBuffers, shape: StepShape) -> CommonMetadata:
    """For layers without a cache: which tokens are whose, and no block."""
    num_rows = shape.num_padded_reqs
    return CommonMetadata(
        query_start_loc=buffers.query_start_loc[: num_rows + 1],
        seq_lens=buffers.seq_lens[:num_rows],
        block_table=buffers.no_blocks[:num_rows],
        slot_mapping=buffers.no_slots,
        num_reqs=num_rows,
        num_tokens=shape.num_padded_tokens,
        num_actual_tokens=shape.num_tokens,
        num_decode_rows=shape.num_decode_rows,
        num_decode_tokens=shape.num_decode_rows,
        max_query_len=shape.max_query_len,
        max_seq_len=shape.max_seq_len,
    )
