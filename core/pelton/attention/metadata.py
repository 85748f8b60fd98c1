"""One step's shape, for one KV group, as attention backends and layers read it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from pelton.sampling.tails import Tail

NO_CACHE = -1
"""`group_id` of a backend whose layers have no cache: its metadata has no blocks."""


@dataclass(slots=True)
class CommonMetadata:
    """R = num_reqs (padded), T = num_tokens (padded), B = blocks of the widest table.

    Tensors are on the device at fixed addresses. Rows with one token (decodes) come first. Padding: rows have query and
    sequence length 0 and point at block 0; tokens have slot -1. Host code never reads `seq_lens` back.
    """

    query_start_loc: Tensor  # [R + 1] int32
    seq_lens: Tensor  # [R] int32, context plus this step's tokens
    block_table: Tensor  # [R, B] int32, kernel blocks
    slot_mapping: Tensor  # [T] int64
    num_reqs: int
    num_tokens: int  # padded
    num_actual_tokens: int
    num_decode_rows: int
    num_decode_tokens: int
    max_query_len: int
    max_seq_len: int  # upper bound
    common_prefix_len: int = 0  # tokens that all rows of one token share, in the blocks that row 0's table starts with
    common_prefix: Tensor | None = None  # [1] int32, the same on the device, 0 for none: where a captured step reads it
    causal: bool = True


@dataclass(frozen=True, slots=True)
class BatchDescriptor:
    """Key of a captured graph."""

    num_tokens: int
    num_reqs: int
    uniform_query_len: int = 0  # most tokens of a row, of which one is known and the others are drafts; 0: any rows
    has_lora: bool = False  # some row has an adapter
    tail: Tail | None = None  # what follows the forward pass; None: nothing, the hidden states are what the step gives
    has_common_prefix: bool = False  # attention reads `CommonMetadata.common_prefix`
    is_prompt: bool = False  # one row of 2 to num_tokens tokens, with none before them: max_seq_len is num_tokens
    side_layout: int = 0  # where side tables lie (`SideTables.layout_version`); 0 too where the tail reads none

    def __str__(self) -> str:
        rows = f" in {self.num_reqs} rows" if self.num_reqs else ""
        if self.uniform_query_len:
            rows += f" of {self.uniform_query_len}"
        words = [f"{self.num_tokens} tokens{rows}" if not self.is_prompt else f"a prompt of {self.num_tokens} tokens"]
        words += [
            word for word, is_so in (("adapters", self.has_lora), ("a common prefix", self.has_common_prefix)) if is_so
        ]
        return " with ".join(words) + (f": {self.tail}" if self.tail is not None else "")


@dataclass(slots=True)
class ForwardBatch:
    """The input of a model's forward. T = num_tokens (padded)."""

    input_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    attention: tuple[Any, ...]  # per set of metadata (`CacheLayer.bind_cache`): what its backend's `build` gave
    num_tokens: int
    adapter: Any = None  # LoRA metadata
    token_types: Tensor | None = None  # [T] int64: 1 for tokens of a pair's second text; None: there are none
    slot_mappings: tuple[Tensor, ...] = ()  # per KV group [T] int64, at fixed addresses where the step is captured
    groups: tuple[CommonMetadata, ...] = ()  # per KV group, for whole-step kernels
    cut: Callable[[Any, Tensor, Tensor], object] | None = None
    """Where a step is cut at attention: called with a layer, its query and the output to fill, in place of the layer's `attend`
    (a `BoundAttention`). The step's keys and values have been written."""
