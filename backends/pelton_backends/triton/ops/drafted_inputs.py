"""A step's inputs and its drafts in one launch: `inputs.py` for rows of which each may have drafts, looked up as `speculation.py` does.

Nothing but the rows' token ids follows from what is found. So programs that look up write these, beside others that prepare the rest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from pelton.platform.compiling import launch
from pelton_backends.triton.ops.inputs import ROW_BLOCK, SHORT, TABLE_BLOCK, TOKEN_BLOCK, prepare_row, tokens_before
from pelton_backends.triton.ops.sampling import speculation
from pelton_backends.triton.ops.sampling.speculation import LookUp, found_in_text
from pelton_backends.triton.runtime import has_pdl, launch_options, let_next_start, wait_for_inputs

if TYPE_CHECKING:
    from torch import Tensor

    from pelton.ops.speculation import LookupDrafts
    from pelton.worker.batch_state import BatchTensors
    from pelton.worker.inputs import InputBuffers, StepShape


@triton.jit(do_not_specialize=["num_tokens"])
def drafted_rows_kernel(
    slots, num_scheduled, num_draft, num_found, groups, token_ids, num_computed_tokens, query_start_loc, seq_lens, input_ids,
    positions, token_stride, num_tokens, LONGEST: tl.constexpr, SHORTEST: tl.constexpr, DRAFTS: tl.constexpr,
    TEXT_BLOCK: tl.constexpr, QUERY_BLOCK: tl.constexpr, TABLE_BLOCK: tl.constexpr, ROW_BLOCK: tl.constexpr,
    TOKEN_BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (R, 1 + G), of rows of up to QUERY_BLOCK tokens: the first R programs look the drafts up, and write the rows' token ids."""
    row, group = tl.program_id(0), tl.program_id(1) - 1
    wait_for_inputs(PDL)
    let_next_start(PDL)
    if group >= 0:
        prepare_row(
            row, group, slots, num_scheduled, groups, token_ids, num_computed_tokens, query_start_loc, seq_lens, input_ids, positions,
            token_stride, num_tokens, 1, False, False, QUERY_BLOCK, TABLE_BLOCK, ROW_BLOCK, TOKEN_BLOCK,
        )  # fmt: skip
    else:
        slot, scheduled, wanted = tl.load(slots + row), tl.load(num_scheduled + row), tl.load(num_draft + row)
        other = tl.arange(0, ROW_BLOCK)
        before = tl.load(num_scheduled + other, mask=other <= row, other=0)
        text = token_ids + slot * token_stride
        context = tl.load(num_computed_tokens + slot)
        i = tl.arange(0, QUERY_BLOCK)
        place = text + tl.minimum(context + i, token_stride - 1)
        known = tl.load(place, mask=i < scheduled, other=0)
        end = tokens_before(before, num_scheduled, row, ROW_BLOCK)
        first, found = found_in_text(text, context + 1, wanted, LONGEST, SHORTEST, DRAFTS, TEXT_BLOCK)
        is_draft = (i > 0) & (i <= found)
        draft = tl.load(text + first + i, mask=is_draft, other=0)
        tl.store(input_ids + end - scheduled + i, tl.where(is_draft, draft, known).to(tl.int64), mask=i < scheduled)
        tl.store(place, draft, mask=is_draft)
        tl.store(num_found + row, found)


class DraftedInputs:
    """Drafts that the next inputs are prepared with."""

    def __init__(self, look_up: LookUp, slots: Tensor, num_draft: Tensor, num_found: Tensor) -> None:
        self._look_up, self._slots, self._num_draft, self._num_found = look_up, slots, num_draft, num_found

    @staticmethod
    def of(look_up: LookupDrafts, slots: Tensor, num_draft: Tensor, num_found: Tensor) -> DraftedInputs | None:
        """None: an op of another backend looks them up."""
        return DraftedInputs(look_up, slots, num_draft, num_found) if isinstance(look_up, LookUp) else None

    def prepare(
        self,
        slots: Tensor,
        num_scheduled: Tensor,
        groups: Tensor,
        state: BatchTensors,
        buffers: InputBuffers,
        shape: StepShape,
    ) -> bool:
        """Look the drafts up, and return whether the inputs are prepared too: of few tokens a row, where the rows are the drafts'."""
        needs = self._look_up.needs
        are_same = len(self._slots) == len(slots) and self._slots.data_ptr() == slots.data_ptr()
        if not are_same or max(shape.max_query_len, 1 + needs.num_drafts) > SHORT:
            self._look_up(self._slots, self._num_draft, self._num_found)
            return False
        pdl = has_pdl(state.device)
        launch(
            drafted_rows_kernel, (len(slots), 1 + groups.shape[0]),
            slots, num_scheduled, self._num_draft, self._num_found, groups, state.token_ids, state.num_computed_tokens,
            buffers.query_start_loc, buffers.seq_lens, buffers.input_ids, buffers.positions, state.token_ids.stride(0),
            shape.num_padded_tokens,
            LONGEST=needs.longest, SHORTEST=needs.shortest, DRAFTS=needs.num_drafts, TEXT_BLOCK=speculation.TEXT_BLOCK,
            QUERY_BLOCK=SHORT, TABLE_BLOCK=TABLE_BLOCK, ROW_BLOCK=ROW_BLOCK, TOKEN_BLOCK=TOKEN_BLOCK, PDL=pdl, num_warps=4,
            **launch_options(pdl),
        )  # fmt: skip
        return True
