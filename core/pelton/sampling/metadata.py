"""What the sampler reads of one step: a row for each row of logits, and what the host knows of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from pelton.sampling.side_tables import SideTables


@dataclass(slots=True, kw_only=True)
class SideRows:
    """The m rows of logits that read side tables, and which features any of them uses."""

    tables: SideTables
    rows: Tensor  # [m] int64, into the logits
    side_slots: Tensor  # [m] int64
    slots: Tensor  # [m] int64, into `token_ids`
    positions: Tensor  # [m] int64, of the token to be sampled
    num_prompt_tokens: Tensor  # [m] int64
    token_ids: Tensor  # [S + 1, W] int32: what came before, drafts included
    is_used: Tensor | None = None  # [m] bool: rows that stay as they are where False; None: there are none
    draft_rows: Tensor | None = None  # [d] int64, into the m rows: a draft that this row takes as output so far
    draft_token_ids: Tensor | None = None  # [d] int64, its value
    has_penalties: bool = False
    has_bias: bool = False
    has_banned: bool = False
    has_min_tokens: bool = False
    has_bad_words: bool = False


@dataclass(slots=True, kw_only=True)
class SamplingMetadata:
    """n = rows of logits. The flags say what some row needs: what none needs is not run."""

    seeds: Tensor  # [n] int64
    positions: Tensor  # [n] int64, of the token to be sampled
    temperature: Tensor  # [n] float32, 0 is greedy
    top_k: Tensor  # [n] int64, the vocabulary's size when off
    top_p: Tensor  # [n] float32
    min_p: Tensor  # [n] float32
    all_greedy: bool
    max_top_k: int = 0  # largest of the rows that have one; 0: none has
    has_top_p: bool = False
    has_min_p: bool = False
    side: SideRows | None = None
    is_captured: bool = False  # no value may be looked at on the way, a CPU's neither
