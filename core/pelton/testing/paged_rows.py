"""Metadata of a step over paged rows, where nobody prepares inputs: tests of backends and models make it from plain tables."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import torch
from torch import Tensor

from pelton.attention.interface import KVLayout
from pelton.attention.metadata import CommonMetadata
from pelton.kv_cache.spec import FullAttentionSpec


def scattered_tables(lengths: Sequence[int], block_size: int, generator: torch.Generator) -> list[list[int]]:
    """Blocks for every row's tokens, in any order, from 1 on."""
    counts = [-(-length // block_size) for length in lengths]
    ids = iter((torch.randperm(sum(counts), generator=generator) + 1).tolist())
    return [list(islice(ids, count)) for count in counts]


def slots_of(table: Sequence[int], num_tokens: int, block_size: int) -> Tensor:
    """[num_tokens] of every position of a row; -1 where the table has the null block."""
    positions = torch.arange(num_tokens)
    blocks = torch.tensor(table, dtype=torch.int64)[positions // block_size]
    return torch.where(blocks > 0, blocks * block_size + positions % block_size, -1)


def own_slots(slots: Tensor, num_ranks: int, rank: int) -> Tensor:
    """From slots in blocks whose tokens go round the ranks to those in this rank's pages, -1 for others'."""
    return torch.where((slots >= 0) & (slots % num_ranks == rank), slots // num_ranks, -1)


def put_together(parts: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Each rank's (output [T, heads, D], log-sum-exp [T, heads]) to the output over all keys, in float64."""
    for output, lse in parts:
        assert not output[lse == -torch.inf].any(), "what a query that sees nothing gets is not zero"
    weights = torch.stack([lse for _, lse in parts]).double().softmax(0)
    return (torch.stack([output for output, _ in parts]).double() * weights.unsqueeze(-1)).sum(0).cpu()


def step_metadata(
    rows: Sequence[tuple[int, int]],
    tables: Sequence[Sequence[int]],
    block_size: int,
    *,
    kernel_block_size: int | None = None,
    num_padding: int = 0,
    beyond: int = 0,
    device: torch.device | None = None,
) -> CommonMetadata:
    """rows: (tokens of this step, tokens before it), those with one token first. num_padding: rows without a query or context,
    and as many tokens without a slot. beyond: the block that a row's table names where the row has none."""
    counts, lengths = [new for new, _ in rows], [new + before for new, before in rows]
    width, ratio = max(map(len, tables)), block_size // (kernel_block_size or block_size)
    slots = [slots_of(table, sum(row), block_size)[row[1] :] for table, row in zip(tables, rows, strict=True)]
    block_table = torch.zeros(len(rows) + num_padding, width * ratio, dtype=torch.int32)
    for row, table in enumerate(tables):
        full = [*table, *[beyond] * (width - len(table))]
        blocks = torch.tensor(full, dtype=torch.int32)[:, None] * ratio + torch.arange(ratio, dtype=torch.int32)
        block_table[row, : blocks.numel()] = blocks.flatten()
    num_decodes = sum(count == 1 for count in counts)
    return CommonMetadata(
        query_start_loc=torch.tensor([0, *counts, *[0] * num_padding]).cumsum(0).int().to(device),
        seq_lens=torch.tensor(lengths + [0] * num_padding, dtype=torch.int32, device=device),
        block_table=block_table.to(device),
        slot_mapping=torch.cat([*slots, torch.full((num_padding,), -1)]).to(device),
        num_reqs=len(rows) + num_padding,
        num_tokens=sum(counts) + num_padding,
        num_actual_tokens=sum(counts),
        num_decode_rows=num_decodes,
        num_decode_tokens=num_decodes,
        max_query_len=max(counts),
        max_seq_len=max(lengths),
    )


def page_views(memory: Tensor, num_blocks: int, spec: FullAttentionSpec, layout: KVLayout) -> tuple[Tensor, Tensor]:
    """Keys and values of one layer: see `FullAttentionSpec.views`."""
    keys, values = spec.views(memory, num_blocks, layout)
    return keys, values
