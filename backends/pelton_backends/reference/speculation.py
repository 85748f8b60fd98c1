"""Plain torch implementations of the ops of speculation. Nothing here asks the device anything."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from pelton.ops.speculation import (
        LookupDrafts,
        LookupDraftsNeeds,
        LookupDraftsTensors,
        Verify,
        VerifyNeeds,
        VerifyTensors,
    )


class ReferenceLookupDrafts:
    is_recordable = True

    @staticmethod
    def unsupported(needs: LookupDraftsNeeds) -> list[str]:
        return []

    @staticmethod
    def bind(needs: LookupDraftsNeeds, tensors: LookupDraftsTensors) -> LookupDrafts:
        state = tensors.state
        place = torch.arange(state.token_ids.shape[1], device=state.device)
        draft = torch.arange(needs.num_drafts, device=state.device)

        def look_up(slots: Tensor, num_draft: Tensor, num_found: Tensor) -> None:
            text, size = state.token_ids[slots], state.num_computed_tokens[slots].unsqueeze(-1) + 1
            matched = torch.zeros_like(text, dtype=torch.int64)
            is_match = place < size - 1
            for back in range(needs.longest):
                last = size - 1 - back
                is_match = is_match & (place >= back) & (text.roll(back, 1) == text.gather(1, last.clamp(min=0)))
                matched += is_match
            is_complete = place + needs.num_drafts < size
            order = torch.where(is_complete, place + 2**40, 2**40 - 1 - place)
            value, first = torch.where(matched >= needs.shortest, matched * 2**42 + order, -1).max(dim=1, keepdim=True)
            found = torch.minimum(size - 1 - first, num_draft.unsqueeze(-1)).clamp(min=0, max=needs.num_drafts)
            found = torch.where(value >= 0, found, 0)
            values = text.gather(1, (first + 1 + draft).clamp(max=state.max_model_len))
            target = torch.where(draft < found, size + draft, state.max_model_len).clamp(max=state.max_model_len)
            state.token_ids[slots.unsqueeze(-1), target] = values
            num_found.copy_(found.squeeze(-1))

        return look_up


class ReferenceVerify:
    is_recordable = True

    @staticmethod
    def unsupported(needs: VerifyNeeds) -> list[str]:
        return []

    @staticmethod
    def bind(needs: VerifyNeeds, tensors: VerifyTensors) -> Verify:
        state = tensors.state
        place = torch.arange(1 + needs.num_drafts, device=state.device)

        def verify(slots: Tensor, num_draft: Tensor, sampled: Tensor, result: Tensor) -> None:
            is_row = slots != state.padding_slot
            tokens, codes = sampled.view(len(slots), len(place), 2).unbind(-1)
            known = state.num_computed_tokens[slots]
            behind = (known.unsqueeze(-1) + 1 + place[:-1]).clamp(max=state.max_model_len)
            is_equal = (state.token_ids[slots.unsqueeze(-1), behind] == tokens[:, :-1]) & (
                place[:-1] < num_draft.unsqueeze(-1)
            )
            accepted = is_equal.long().cumprod(dim=1).sum(dim=1)
            last = tokens.gather(1, accepted.unsqueeze(-1)).squeeze(-1)
            result[:, 0] = accepted
            result[:, 1] = torch.where(place <= accepted.unsqueeze(-1), codes, 0).amax(dim=1)
            result[:, 2] = num_draft
            result[:, 3:] = tokens
            result.masked_fill_(~is_row.unsqueeze(-1), 0)
            at = (known + 1 + accepted).clamp(max=state.max_model_len)
            state.token_ids[slots, at] = torch.where(is_row, last, state.token_ids[slots, at])
            state.num_computed_tokens.index_add_(0, slots, torch.where(is_row, 1 + accepted, 0))

        return verify
