"""Metadata of the sampler for one step: a row for each row of logits, and what the host knows of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pelton.sampling.columns import RANDOM

if TYPE_CHECKING:
    from torch import Tensor

    from pelton.sampling.side_tables import SideTensors


@dataclass(slots=True, kw_only=True)
class SideRows:
    """The m rows of logits that read side tables, and which features any of them uses."""

    tables: SideTensors
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
    """n = rows of logits. `active` and the flags say what some row needs: what none needs is not run."""

    seeds: Tensor  # [n] int64
    positions: Tensor  # [n] int64, of the token to be sampled
    columns: Mapping[str, Tensor]  # [n] each, by the names of `sampling.columns.SAMPLING_COLUMNS`
    active: frozenset[str]  # columns that some row needs; the others need not be looked at
    max_top_k: int = 0  # largest of the rows that have one; 0: none has
    side: SideRows | None = None
    is_captured: bool = False  # no value may be looked at on the way, a CPU's neither

    @property
    def all_greedy(self) -> bool:
        return RANDOM not in self.active
