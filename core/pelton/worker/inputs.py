"""One step's inputs: ids, positions, slots and tables, in buffers at fixed addresses, which the op `prepare_inputs` fills from the
batch state. R = rows, T = tokens, both padded where the caller asks for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pelton import moved
from pelton.attention.metadata import CommonMetadata
from pelton.worker.batch_state import BatchTensors

if not TYPE_CHECKING:
    __getattr__ = moved.names_of(__name__)


@dataclass(slots=True, kw_only=True)
class StepShape:
    """The size of a step as the host knows it, without a value."""

    num_reqs: int
    num_tokens: int
    num_decode_rows: int
    max_query_len: int
    max_seq_len: int
    num_padded_reqs: int
    num_padded_tokens: int
    common_prefix_blocks: tuple[int, ...] = ()


class InputBuffers:
    """Fixed memory for the largest step."""

    def __init__(
        self, state: BatchTensors, *, max_num_tokens: int, kernel_block_sizes: Sequence[int] | None = None
    ) -> None:
        """kernel_block_sizes: tokens of a block as each group's backend counts; the manager's when None."""
        device, rows = state.device, state.max_num_seqs
        self.max_num_tokens = max_num_tokens
        self.input_ids = torch.zeros(max_num_tokens, dtype=torch.int64, device=device)
        self.positions = torch.zeros(max_num_tokens, dtype=torch.int64, device=device)
        self.query_start_loc = torch.zeros(rows + 1, dtype=torch.int32, device=device)
        self.seq_lens = torch.zeros(rows, dtype=torch.int32, device=device)
        self.slot_mapping = [torch.zeros(max_num_tokens, dtype=torch.int64, device=device) for _ in state.block_sizes]
        sizes = tuple(kernel_block_sizes or state.block_sizes)
        self.blocks_per_block = [block // kernel for block, kernel in zip(state.block_sizes, sizes, strict=True)]
        for block, kernel, ratio in zip(state.block_sizes, sizes, self.blocks_per_block, strict=True):
            assert kernel * ratio == block, f"kernel blocks of {kernel} tokens do not fill a block of {block}"
        self.block_tables = [
            torch.zeros(rows, table.shape[1] * ratio, dtype=torch.int32, device=device)
            for table, ratio in zip(state.block_tables, self.blocks_per_block, strict=True)
        ]
        self.token_index = torch.arange(max_num_tokens, device=device)
        self.no_blocks = torch.zeros(rows, 0, dtype=torch.int32, device=device)
        self.no_slots = torch.zeros(0, dtype=torch.int64, device=device)
        self.parts = [torch.arange(ratio, dtype=torch.int32, device=device) for ratio in self.blocks_per_block]


def common_metadata(state: BatchTensors, buffers: InputBuffers, group: int, shape: StepShape) -> CommonMetadata:
    """One group's, over the buffers that `prepare_inputs` fills."""
    num_rows, num_tokens, block_size = shape.num_padded_reqs, shape.num_padded_tokens, state.block_sizes[group]
    width = min(-(-shape.max_seq_len // block_size), state.block_tables[group].shape[1])
    common = shape.common_prefix_blocks
    return CommonMetadata(
        query_start_loc=buffers.query_start_loc[: num_rows + 1], seq_lens=buffers.seq_lens[:num_rows],
        block_table=buffers.block_tables[group][:num_rows, : width * buffers.blocks_per_block[group]],
        slot_mapping=buffers.slot_mapping[group][:num_tokens], num_reqs=num_rows, num_tokens=num_tokens,
        num_actual_tokens=shape.num_tokens, num_decode_rows=shape.num_decode_rows, num_decode_tokens=shape.num_decode_rows,
        max_query_len=shape.max_query_len, max_seq_len=shape.max_seq_len,
        common_prefix_len=common[group] * block_size if common else 0,
    )  # fmt: skip
