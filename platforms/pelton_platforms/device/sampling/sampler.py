"""From logits to tokens, for all rows of a step at once; no row's arithmetic depends on another row.

One uniform number for each (seed, position) picks the token at that place of the cumulated distribution.
n = rows of logits, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pelton.sampling.columns import RANDOM
from pelton.sampling.error_codes import NOT_FINITE, NOTHING_ALLOWED, OK
from pelton_platforms.device.sampling.filters import filtered_probs
from pelton_platforms.device.sampling.metadata import SamplingMetadata
from pelton_platforms.device.sampling.penalties import apply_side_tables
from pelton_platforms.device.sampling.random import uniform


def sample(
    logits: Tensor,
    metadata: SamplingMetadata,
    mask: tuple[Tensor, Tensor] | None = None,
    process: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """logits [n, V] float32, overwritten -> (token ids [n] int64, error codes [n] int64).

    mask: (rows [g] int64, allowed [g, V] bool) of a grammar. process: writes what logits processors make of the logits, and returns
    error codes [n]. A row with an error code has some token id below V.
    """
    codes: Tensor | None = None
    if mask is not None or metadata.side is not None or process is not None:
        codes = _check(logits.amax(dim=-1), NOT_FINITE)
    if process is not None and codes is not None:
        codes = torch.where(codes == OK, process(logits), codes)
    if mask is not None:
        rows, allowed = mask
        logits[rows] = logits[rows].masked_fill(~allowed, -torch.inf)
    if metadata.side is not None:
        apply_side_tables(logits, metadata.side)
    best, token_ids = logits.max(dim=-1)
    if codes is None:
        codes = _check(best, NOT_FINITE)
    else:
        codes = torch.where(codes == OK, _check(best, NOTHING_ALLOWED), codes)
    if not metadata.all_greedy:
        is_greedy = metadata.columns[RANDOM] == 0
        token_ids = torch.where(is_greedy, token_ids, sample_random(logits, metadata))
    return token_ids, codes


def sample_random(logits: Tensor, metadata: SamplingMetadata) -> Tensor:
    """[n] int64; what greedy rows get here is not used."""
    temperature = metadata.columns[RANDOM]
    temperature = torch.where(temperature == 0, 1.0, temperature)
    probs = filtered_probs(logits / temperature.unsqueeze(-1), metadata)
    return pick(probs, uniform(metadata.seeds, metadata.positions))


def pick(probs: Tensor, numbers: Tensor) -> Tensor:
    """probs [n, V], need not sum to 1; numbers [n] in (0, 1). Never a token of probability 0."""
    cumulated = probs.cumsum(dim=-1, dtype=torch.float64)
    target = numbers.unsqueeze(-1) * cumulated[:, -1:]
    # right=True: the first place whose sum is above the target, so places that add nothing are passed over.
    place = torch.searchsorted(cumulated, target, right=True).squeeze(-1)
    return place.clamp(max=probs.shape[-1] - 1)  # NaN rows land past the end; they carry an error code


def _check(best: Tensor, code: int) -> Tensor:
    return torch.where(best.isfinite(), OK, code)


def unpack_bitmask(words: Tensor, vocab_size: int) -> Tensor:
    """words [g, ceil(v / 32)] int32 -> [g, vocab_size] bool; tokens beyond the mask's last word are not allowed."""
    place = torch.arange(vocab_size, device=words.device)
    word = (place // 32).clamp(max=words.shape[1] - 1)
    allowed = ((words[:, word] >> (place % 32)) & 1).bool()
    return allowed & (place < words.shape[1] * 32)
