"""The batch as ops read and write it: a row of every tensor for each running request, by slot.

S = max_num_seqs. Row S belongs to no request: padding rows of a step point at it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pelton import moved
from pelton.sampling.columns import SamplingTensors

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from pelton.sampling.side_tables import SideTensors
else:
    __getattr__ = moved.names_of(__name__)

NO_LOGPROBS, ALL_LOGPROBS = -2, -1  # in the logprobs columns; all: the whole vocabulary


class BatchTensors(SamplingTensors):
    """A worker's batch. The host writes it before a step, the step's ops after it sampled."""

    device: torch.device
    max_num_seqs: int
    vocab_size: int
    padding_slot: int
    token_ids: Tensor  # [S + 1, max_model_len + 1] int32; the last column takes what must not be kept
    num_computed_tokens: Tensor  # [S + 1] int64, as the next five
    num_prompt_tokens: Tensor
    seeds: Tensor
    side_slots: Tensor  # -1 without side tables
    num_logprobs: Tensor
    adapter_slots: Tensor  # -1 without an adapter
    block_sizes: tuple[int, ...]  # tokens of a block of each KV group
    block_tables: list[Tensor]  # of each KV group: [S + 1, blocks] int32
    draft_token_ids: Tensor  # [S + 1, most drafts] int64
    side: SideTensors

    @property
    def max_model_len(self) -> int:
        return self.token_ids.shape[1] - 1
