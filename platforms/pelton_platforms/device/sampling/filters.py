"""Which tokens stay candidates: min_p, top_k and top_p, by a threshold for each row. No sort of the vocabulary.

Tokens that tie with the last one kept are kept too, so that the outcome does not rest on a sort's order.
n = rows, V = vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from pelton_platforms.device.sampling.metadata import SamplingMetadata

_NUM_CANDIDATES = 512  # most nuclei are smaller; looked at first where the host may look


def filtered_probs(logits: Tensor, metadata: SamplingMetadata) -> Tensor:
    """logits [n, V] after temperature -> the probabilities that are sampled, up to a factor for each row."""
    columns, active = metadata.columns, metadata.active
    if "min_p" in active:
        logits = keep_min_p(logits, columns["min_p"])
    if metadata.max_top_k:
        logits = keep_top_k(logits, columns["top_k"], metadata.max_top_k)
    probs = logits.softmax(dim=-1)
    return keep_top_p(probs, columns["top_p"], is_captured=metadata.is_captured) if "top_p" in active else probs


def keep_min_p(logits: Tensor, min_p: Tensor) -> Tensor:
    """Drop tokens less likely than min_p [n] times the likeliest; logits [n, V] after temperature."""
    least = logits.amax(dim=-1, keepdim=True) + min_p.log().unsqueeze(-1)  # log 0 = -inf keeps all
    return logits.masked_fill(logits < least, -torch.inf)


def keep_top_k(logits: Tensor, top_k: Tensor, max_top_k: int) -> Tensor:
    """Keep the top_k [n] int64 likeliest tokens of each row; a value above `max_top_k` keeps the whole row.

    max_top_k: the largest top_k of the rows that have one, known to the host.
    """
    best = logits.topk(min(max_top_k, logits.shape[-1]), dim=-1).values
    least = best.gather(1, (top_k - 1).clamp(0, best.shape[1] - 1).unsqueeze(-1))
    least = torch.where((top_k > max_top_k).unsqueeze(-1), -torch.inf, least)
    return logits.masked_fill(logits < least, -torch.inf)


def keep_top_p(probs: Tensor, top_p: Tensor, *, is_captured: bool = False) -> Tensor:
    """Zero all but the nucleus: the likeliest tokens whose sum reaches top_p [n]; probs [n, V] float32, not renormalised."""
    return probs.masked_fill(probs < nucleus_threshold(probs, top_p, is_captured=is_captured).unsqueeze(-1), 0.0)


def nucleus_threshold(probs: Tensor, top_p: Tensor, *, is_captured: bool = False) -> Tensor:
    """[n]: the greatest t such that the tokens with probability >= t sum to top_p; 0 where top_p is 1."""
    keeps_all = top_p >= 1.0
    if probs.device.type == "cpu" and not is_captured:
        threshold, is_found = _threshold_among_best(probs, top_p)
        if not bool((is_found | keeps_all).all()):  # costs nothing on a CPU; elsewhere it would wait for the device
            threshold = torch.where(is_found, threshold, _threshold_by_bisection(probs, top_p))
    else:
        threshold = _threshold_by_bisection(probs, top_p)
    return threshold.masked_fill(keeps_all, 0.0)


def _threshold_among_best(probs: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    best = probs.topk(min(_NUM_CANDIDATES, probs.shape[-1]), dim=-1).values
    is_enough = best.cumsum(dim=-1, dtype=torch.float64) >= top_p.double().unsqueeze(-1)
    first = is_enough.int().argmax(dim=-1, keepdim=True)
    return best.gather(1, first).squeeze(1), is_enough[:, -1]


def _threshold_by_bisection(probs: Tensor, top_p: Tensor) -> Tensor:
    """Exact: bits of non-negative floats are in the floats' order, so 31 halvings find the one threshold."""
    bits = probs.view(torch.int32)
    low = torch.zeros(probs.shape[0], dtype=torch.int32, device=probs.device)  # sums to top_p at least
    high = bits.amax(dim=-1) + 1  # does not
    for _ in range(31):
        middle = low + (high - low) // 2
        mass = torch.where(bits >= middle.unsqueeze(-1), probs, 0.0).sum(dim=-1, dtype=torch.float64)
        is_enough = mass >= top_p.double()
        low, high = torch.where(is_enough, middle, low), torch.where(is_enough, high, middle)
    return low.view(torch.float32)
