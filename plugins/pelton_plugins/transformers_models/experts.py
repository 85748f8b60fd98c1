"""Experts of transformers' modules. In other dtypes than bfloat16 a grouped product reads sizes on the host, so no graph holds it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor

NAME = "pelton"
MOST_GATHERED_BYTES = 1 << 30


def register() -> None:
    """Enter the function in transformers' table."""
    from transformers.integrations.moe import ExpertsInterface

    ExpertsInterface.register(NAME, experts)


def experts(module: Any, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Compute each token's experts [T, K] of `hidden` [T, H] and add them up by their weights [T, K]."""
    from transformers.integrations.moe import batched_mm_experts_forward, grouped_mm_experts_forward

    compute = batched_mm_experts_forward if is_gathered(module, hidden, top_k_index) else grouped_mm_experts_forward
    added: Tensor = compute(module, hidden, top_k_index, top_k_weights)
    return added


def is_gathered(module: Any, hidden: Tensor, top_k_index: Tensor) -> bool:
    """Return whether each token gets its own copy of its experts' matrices: what a graph can hold, where that is little memory."""
    if not hidden.is_cuda or hidden.dtype is torch.bfloat16:
        return False
    matrices = [one for one in module.parameters() if one.dim() == 3]
    copied: int = sum(one.nbytes // one.shape[0] for one in matrices) * top_k_index.numel()
    return copied <= MOST_GATHERED_BYTES
