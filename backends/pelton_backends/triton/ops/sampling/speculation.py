"""Speculation in Triton: drafts found in a request's own text, and drafts verified; a launch each.

Math   `LookupDrafts` and `Verify` of pelton.ops.speculation, to the bit: integers only.
Paper  Saxena, "Prompt Lookup Decoding", 2023; Leviathan et al., Fast Inference from Transformers via Speculative Decoding, ICML 2023
       (arXiv:2211.17192), with drafts that are certain.

R rows, K drafts
  slots, num_draft, num_found  [R]           int64, contiguous
  token_ids                    [S + 1, W]    int32, rows contiguous
  num_computed_tokens          [S + 1]       int64
  sampled                      [R (1 + K), 2] int32, or best [R (1 + K)] int64, see `best.py`;  result [R, 4 + K] int32

A program a row. Looking up reads the text once from memory, and `longest` times from the cache behind it; the work follows from
the text's length, which the device knows: a captured launch is as short as the text.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from pelton.ops.speculation import (
    LookupDrafts,
    LookupDraftsNeeds,
    LookupDraftsTensors,
    Verify,
    VerifyNeeds,
    VerifyTensors,
)
from pelton.platform.compiling import launch
from pelton_backends.triton.ops.sampling.best import best_of, token_of_best
from pelton_backends.triton.runtime import has_pdl, launch_options, let_next_start, wait_for_inputs

TEXT_BLOCK = 1024


@triton.jit
def found_in_text(
    text, size, wanted, LONGEST: tl.constexpr, SHORTEST: tl.constexpr, DRAFTS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Where the end of a text of `size` tokens has been before, and how many of the tokens behind that place are drafts.

    A place's worth is (tokens that match, whether DRAFTS tokens are behind it, which comes first), in one number. No load waits for
    another."""
    best = tl.full([], -1, tl.int64)
    end = tl.where(wanted > 0, size - 1, 0)
    start = end * 0
    while start < end:
        place = start + tl.arange(0, BLOCK)
        is_inside = place < end
        is_match = is_inside
        matched = tl.zeros([BLOCK], tl.int64)
        for back in tl.static_range(LONGEST):
            last = tl.load(text + tl.maximum(size - 1 - back, 0))
            other = tl.load(text + place - back, mask=is_inside & (place >= back), other=-1)
            is_match = is_match & (other == last)
            matched += is_match.to(tl.int64)
        order = tl.where(place + DRAFTS < size, place + 1099511627776, 1099511627775 - place)
        worth = tl.where(matched >= SHORTEST, matched * 4398046511104 + order, -1)
        best = tl.maximum(best, tl.max(worth, 0))
        start += BLOCK
    order = best % 4398046511104
    first = tl.where(order >= 1099511627776, order - 1099511627776, 1099511627775 - order)
    found = tl.where(best >= 0, tl.minimum(tl.minimum(size - 1 - first, wanted), DRAFTS), 0)
    return first, found


@triton.jit
def lookup_kernel(
    slots,
    num_draft,
    num_found,
    token_ids,
    num_computed_tokens,
    token_stride,
    LONGEST: tl.constexpr,
    SHORTEST: tl.constexpr,
    DRAFTS: tl.constexpr,
    DRAFTS_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    wait_for_inputs(PDL)
    let_next_start(PDL)
    slot = tl.load(slots + row)
    wanted = tl.load(num_draft + row)
    text = token_ids + slot * token_stride
    size = tl.load(num_computed_tokens + slot) + 1
    first, found = found_in_text(text, size, wanted, LONGEST, SHORTEST, DRAFTS, BLOCK)
    draft = tl.arange(0, DRAFTS_BLOCK)
    is_draft = draft < found
    values = tl.load(text + first + 1 + draft, mask=is_draft, other=0)
    tl.store(text + tl.minimum(size + draft, token_stride - 1), values, mask=is_draft)
    tl.store(num_found + row, found)


@triton.jit
def verify_kernel(
    slots,
    num_draft,
    sampled,
    best,
    result,
    token_ids,
    num_computed_tokens,
    token_stride,
    padding_slot,
    V: tl.constexpr,
    DRAFTS: tl.constexpr,
    TOKENS_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    wait_for_inputs(PDL)
    let_next_start(PDL)
    slot = tl.load(slots + row)
    drafted = tl.load(num_draft + row)
    is_row = slot != padding_slot
    known = tl.load(num_computed_tokens + slot)
    text = token_ids + slot * token_stride
    place = tl.arange(0, TOKENS_BLOCK)
    is_token = place < DRAFTS + 1
    own = row * (DRAFTS + 1) + place
    if best is None:
        tokens = tl.load(sampled + 2 * own, mask=is_token, other=0)
        codes = tl.load(sampled + 2 * own + 1, mask=is_token, other=0)
    else:
        tokens, codes = token_of_best(tl.load(best + own, mask=is_token, other=0), V)
    is_draft = (place < DRAFTS) & (place < drafted)
    drafts = tl.load(text + tl.minimum(known + 1 + place, token_stride - 1), mask=is_draft, other=-1)
    # The first place whose draft is none, or another token.
    accepted = tl.min(tl.where(is_draft & (drafts == tokens), TOKENS_BLOCK, place), 0)
    code = tl.max(tl.where(place <= accepted, codes, 0), 0)
    target = result + row * (DRAFTS + 4)
    tl.store(target, tl.where(is_row, accepted, 0))
    tl.store(target + 1, tl.where(is_row, code, 0))
    tl.store(target + 2, tl.where(is_row, drafted, 0).to(tl.int32))
    tl.store(target + 3 + place, tl.where(is_row, tokens, 0), mask=is_token)
    if is_row:
        last = tl.sum(tl.where(place == accepted, tokens, 0), 0)
        tl.store(text + tl.minimum(known + 1 + accepted, token_stride - 1), last)
        tl.store(num_computed_tokens + slot, known + 1 + accepted)


class TritonLookupDrafts:
    @staticmethod
    def unsupported(needs: LookupDraftsNeeds) -> list[str]:
        return []

    @staticmethod
    def bind(needs: LookupDraftsNeeds, tensors: LookupDraftsTensors) -> LookupDrafts:
        return LookUp(needs, tensors)


class LookUp:
    def __init__(self, needs: LookupDraftsNeeds, tensors: LookupDraftsTensors) -> None:
        self.needs, self._state = needs, tensors.state
        self._pdl = has_pdl(tensors.state.device)

    def __call__(self, slots: Tensor, num_draft: Tensor, num_found: Tensor) -> None:
        needs, state = self.needs, self._state
        launch(
            lookup_kernel, (len(slots),),
            slots, num_draft, num_found, state.token_ids, state.num_computed_tokens, state.token_ids.stride(0),
            LONGEST=needs.longest, SHORTEST=needs.shortest, DRAFTS=needs.num_drafts,
            DRAFTS_BLOCK=triton.next_power_of_2(needs.num_drafts), BLOCK=TEXT_BLOCK, PDL=self._pdl, num_warps=4,
            **launch_options(self._pdl),
        )  # fmt: skip


class TritonVerify:
    @staticmethod
    def unsupported(needs: VerifyNeeds) -> list[str]:
        return []

    @staticmethod
    def bind(needs: VerifyNeeds, tensors: VerifyTensors) -> Verify:
        return _Verify(needs, tensors)


class _Verify:
    def __init__(self, needs: VerifyNeeds, tensors: VerifyTensors) -> None:
        self._num_drafts, self._state = needs.num_drafts, tensors.state
        self._pdl = has_pdl(tensors.state.device)

    def __call__(self, slots: Tensor, num_draft: Tensor, sampled: Tensor, result: Tensor) -> None:
        self._launch(slots, num_draft, sampled, None, result)

    def verify_greedy(self, slots: Tensor, num_draft: Tensor, logits: Tensor, result: Tensor) -> bool:
        best = best_of(logits)
        if best is not None:
            self._launch(slots, num_draft, None, best, result)
        return best is not None

    def _launch(
        self, slots: Tensor, num_draft: Tensor, sampled: Tensor | None, best: Tensor | None, result: Tensor
    ) -> None:
        state = self._state
        launch(
            verify_kernel, (len(slots),),
            slots, num_draft, sampled, best, result, state.token_ids, state.num_computed_tokens, state.token_ids.stride(0),
            state.padding_slot,
            V=state.vocab_size, DRAFTS=self._num_drafts, TOKENS_BLOCK=triton.next_power_of_2(self._num_drafts + 1),
            PDL=self._pdl, num_warps=1, **launch_options(self._pdl),
        )  # fmt: skip
