"""Plain torch implementations of the ops around a step's forward pass: its inputs, and its tokens.

Nothing here asks the device anything, so a captured graph can hold both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pelton.ops.interface import (
    Logprobs,
    LogprobsNeeds,
    LogprobsTensors,
    PrepareInputs,
    PrepareInputsNeeds,
    PrepareInputsTensors,
    Sample,
    SampleNeeds,
    SampleTensors,
)
from pelton.sampling.logprobs import LogprobTensors, gather_logprobs
from pelton.worker.inputs import common_metadata
from pelton_platforms.device.sampling.metadata import SamplingMetadata, SideRows
from pelton_platforms.device.sampling.sampler import sample, unpack_bitmask

if TYPE_CHECKING:
    from torch import Tensor

    from pelton.attention.metadata import CommonMetadata
    from pelton.worker.batch_state import BatchTensors
    from pelton.worker.inputs import InputBuffers, StepShape


class ReferencePrepareInputs:
    is_recordable = True

    @staticmethod
    def unsupported(needs: PrepareInputsNeeds) -> list[str]:
        return []

    @staticmethod
    def bind(needs: PrepareInputsNeeds, tensors: PrepareInputsTensors) -> PrepareInputs:
        def prepare(slots: Tensor, num_scheduled: Tensor, shape: StepShape) -> list[CommonMetadata]:
            return prepare_inputs(tensors.state, tensors.buffers, slots, num_scheduled, shape)

        return prepare


def prepare_inputs(
    state: BatchTensors, buffers: InputBuffers, slots: Tensor, num_scheduled: Tensor, shape: StepShape
) -> list[CommonMetadata]:
    """Fill the buffers; one `CommonMetadata` for each KV group, over views of them.

    slots, num_scheduled [R] int64; padding rows have slot `state.padding_slot` and nothing scheduled.
    """
    num_rows, num_tokens = shape.num_padded_reqs, shape.num_padded_tokens
    starts = buffers.query_start_loc[: num_rows + 1]
    starts[1:] = num_scheduled.cumsum(0)
    context = state.num_computed_tokens[slots]
    is_row = num_scheduled > 0
    seq_lens = buffers.seq_lens[:num_rows]
    seq_lens.copy_(torch.where(is_row, context + num_scheduled, 0))

    token = buffers.token_index[:num_tokens]
    row = torch.searchsorted(starts[1:], token, right=True, out_int32=False)
    is_token = row < num_rows  # tokens past the last row are padding
    row = row.clamp(max=max(num_rows - 1, 0))
    position = torch.where(is_token, context[row] + token - starts[row], 0)
    slot = slots[row]
    buffers.positions[:num_tokens] = position
    known = state.token_ids[slot, position.clamp(max=state.max_model_len)]
    buffers.input_ids[:num_tokens] = torch.where(is_token, known, 0)

    return [
        _group_metadata(state, buffers, group, slots, slot, position, is_token, shape)
        for group in range(len(state.block_tables))
    ]


def _group_metadata(
    state: BatchTensors,
    buffers: InputBuffers,
    group: int,
    slots: Tensor,
    slot: Tensor,
    position: Tensor,
    is_token: Tensor,
    shape: StepShape,
) -> CommonMetadata:
    common, block_size = common_metadata(state, buffers, group, shape), state.block_sizes[group]
    table, ratio = state.block_tables[group], buffers.blocks_per_block[group]
    block = table[slot, position // block_size].long()
    common.slot_mapping.copy_(torch.where(is_token, block * block_size + position % block_size, -1))
    blocks = table[slots, : common.block_table.shape[1] // ratio]
    if ratio > 1:
        blocks = (blocks.unsqueeze(-1) * ratio + buffers.parts[group]).flatten(1)
    common.block_table.copy_(blocks)
    return common


class ReferenceSample:
    """Every filter and every side table is looked at in the full variant: which of them a row uses is not known here."""

    is_recordable = True

    @staticmethod
    def unsupported(needs: SampleNeeds) -> list[str]:
        return [] if needs.variant in ("greedy", "full") else [f"variant {needs.variant!r}"]

    @staticmethod
    def bind(needs: SampleNeeds, tensors: SampleTensors) -> Sample:
        state, vocab_size = tensors.state, needs.vocab_size

        def sample_rows(logits: Tensor, slots: Tensor, result: Tensor) -> None:
            is_row = slots != state.padding_slot
            positions = state.num_computed_tokens[slots] + 1
            raw = logits.clone() if tensors.logprobs is not None else None
            metadata = _metadata(state, slots, positions, vocab_size, needs.variant)
            mask = None if tensors.mask is None else _unpack(tensors.mask, slots, is_row, vocab_size)
            token_ids, codes = sample(logits, metadata, mask)
            if raw is not None and tensors.logprobs is not None:
                _write_logprobs(tensors.logprobs, gather_logprobs(raw, token_ids, needs.num_logprobs))
            if metadata.side is not None:
                has_side = is_row & (state.side_slots[slots] >= 0)
                state.side.count(metadata.side.side_slots, token_ids, has_side.to(torch.int32))
            advance(state, slots, token_ids, codes, result)

        return sample_rows


def advance(state: BatchTensors, slots: Tensor, token_ids: Tensor, codes: Tensor, result: Tensor) -> None:
    """Write what rows of these slots took, [n] int64 each, to `result` [n, 2] int32 and to the state."""
    is_row = slots != state.padding_slot
    result[:, 0] = torch.where(is_row, token_ids, 0)
    result[:, 1] = torch.where(is_row, codes, 0)
    place = (state.num_computed_tokens[slots] + 1).clamp(max=state.max_model_len)
    state.token_ids[slots, place] = torch.where(is_row, token_ids.to(torch.int32), state.token_ids[slots, place])
    state.num_computed_tokens.index_add_(0, slots, is_row.long())


class ReferenceLogprobs:
    is_recordable = True

    @staticmethod
    def unsupported(needs: LogprobsNeeds) -> list[str]:
        return []

    @staticmethod
    def bind(needs: LogprobsNeeds, tensors: LogprobsTensors) -> Logprobs:
        def write(logits: Tensor, token_ids: Tensor, target: LogprobTensors) -> None:
            _write_logprobs(target, gather_logprobs(logits, token_ids, needs.num_logprobs))

        return write


def _metadata(state: BatchTensors, slots: Tensor, positions: Tensor, vocab_size: int, variant: str) -> SamplingMetadata:
    is_full = variant == "full"
    return SamplingMetadata(
        seeds=state.seeds[slots],
        positions=positions,
        columns={name: column[slots] for name, column in state.sampling.items()},
        active=frozenset(state.sampling) if is_full else frozenset(),
        max_top_k=vocab_size,
        is_captured=True,
        side=_side_rows(state, slots, positions) if is_full and state.side.counts.shape[0] else None,
    )


def _side_rows(state: BatchTensors, slots: Tensor, positions: Tensor) -> SideRows:
    """Every row is one, those without side tables under a spare slot's number that `is_used` takes back."""
    side_slots = state.side_slots[slots]
    return SideRows(
        tables=state.side,
        rows=torch.arange(len(slots), device=slots.device),
        side_slots=side_slots.clamp(min=0),
        slots=slots,
        positions=positions,
        num_prompt_tokens=state.num_prompt_tokens[slots],
        token_ids=state.token_ids,
        is_used=side_slots >= 0,
        has_penalties=True,
        has_bias=True,
        has_banned=True,
        has_min_tokens=True,
        has_bad_words=True,
    )


def _unpack(mask: tuple[Tensor, Tensor], slots: Tensor, is_row: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """(rows, allowed) of all rows: a row without a mask allows every token."""
    words, has_mask = mask
    allowed = unpack_bitmask(words[slots], vocab_size)
    return torch.arange(len(slots), device=slots.device), allowed | ~(has_mask[slots] & is_row).unsqueeze(-1)


def _write_logprobs(target: LogprobTensors, values: LogprobTensors) -> None:
    count, width = values.token_ids.shape
    target.token_ids[:count, :width] = values.token_ids
    target.logprobs[:count, :width] = values.logprobs
    target.ranks[:count] = values.ranks
