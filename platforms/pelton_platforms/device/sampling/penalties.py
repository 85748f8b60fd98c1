"""Change logits as side tables say: masks, bad words, bias, penalties; for all rows that have any, at once.

m = rows that read side tables, V = vocabulary. The order is vLLM's: allowed ids, bad words, min_tokens, bias, penalties.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pelton_platforms.device.sampling.metadata import SideRows


def apply_side_tables(logits: Tensor, side: SideRows) -> None:
    """logits [n, V] float32, changed in place at `side.rows`."""
    raw = part = logits[side.rows]
    tables, slots = side.tables, side.side_slots
    if side.has_banned:
        part = part.masked_fill(tables.banned[slots], -torch.inf)
    if side.has_bad_words:
        part = ban_bad_words(part, side)
    if side.has_min_tokens:
        is_early = side.positions - side.num_prompt_tokens < tables.min_tokens[slots]
        part = part.masked_fill(tables.stop_ids[slots] & is_early.unsqueeze(-1), -torch.inf)
    if side.has_bias:
        part = part + tables.bias[slots]
    if side.has_penalties:
        counts = tables.counts[slots]
        if side.draft_rows is not None and side.draft_token_ids is not None:
            ones = torch.ones_like(side.draft_rows, dtype=torch.int32)
            counts.view(-1).index_add_(0, side.draft_rows * counts.shape[1] + side.draft_token_ids, ones)
        part = penalize(
            part, counts, tables.in_prompt[slots],
            presence=tables.presence_penalty[slots], frequency=tables.frequency_penalty[slots],
            repetition=tables.repetition_penalty[slots],
        )  # fmt: skip
    logits[side.rows] = part if side.is_used is None else torch.where(side.is_used.unsqueeze(-1), part, raw)


def penalize(
    logits: Tensor, counts: Tensor, in_prompt: Tensor, *, presence: Tensor, frequency: Tensor, repetition: Tensor
) -> Tensor:
    """logits, counts (of output tokens), in_prompt [m, V]; penalties [m]. Repetition looks at the prompt too."""
    is_output = counts > 0
    factor = torch.where(is_output | in_prompt, repetition.unsqueeze(-1), 1.0)
    logits = torch.where(logits > 0, logits / factor, logits * factor)
    return logits - frequency.unsqueeze(-1) * counts - presence.unsqueeze(-1) * is_output


def ban_bad_words(logits: Tensor, side: SideRows) -> Tensor:
    """Ban a word's last token where the *output* so far ends with the tokens before it."""
    tables, slots = side.tables, side.side_slots
    prefix, length = tables.bad_word_prefix[slots], tables.bad_word_prefix.shape[-1]  # [m, W, L]
    prefix_len = tables.bad_word_prefix_len[slots].unsqueeze(-1)  # [m, W, 1]
    place = torch.arange(length, device=logits.device)
    before = (side.positions.unsqueeze(-1) - length + place).clamp(min=0)
    ending = side.token_ids[side.slots.unsqueeze(-1), before].unsqueeze(1)  # [m, 1, L]
    is_equal = ((prefix == ending) | (place < length - prefix_len)).all(dim=-1)  # [m, W]
    num_output = (side.positions - side.num_prompt_tokens).unsqueeze(-1)
    prefix_len = prefix_len.squeeze(-1)
    is_banned = is_equal & (prefix_len >= 0) & (prefix_len <= num_output)
    penalty = torch.zeros(is_banned.shape, device=logits.device).masked_fill(is_banned, -torch.inf)
    return logits.scatter_add(1, tables.bad_word_last[slots], penalty)  # adding: two words may end alike
