"""Messages between scheduler and workers, for one step: columns, not objects per request and step.

R = rows (scheduled requests) of the step. Rows with one token come first. No torch in this file.
"""

from __future__ import annotations

import msgspec

from pelton.messages.outputs import LogprobColumns, PackedLogprobs
from pelton.messages.request import AdapterRef, MultiModalItem, PoolingParams, TensorData
from pelton.sampling_params import SamplingParams


class NewRequest(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A request that gets a slot in this step: a new one, or one that resumes after preemption."""

    request_id: str
    slot: int
    """Row of every `BatchState` tensor until the slot is in `freed_slots`."""
    token_ids: list[int]
    """All tokens known on the host: prompt, and output so far when it resumes."""
    packed_token_ids: bytes = b""
    """The same as little-endian int64, or nothing. An executor whose workers are in other processes may leave them out."""
    num_prompt_tokens: int
    sampling_params: SamplingParams
    pooling_params: PoolingParams | None = None
    """Set: the row is pooled when its last token is computed, and nothing is sampled."""
    eos_token_ids: list[int] = []
    bad_words_token_ids: list[list[int]] = []
    seed: int = 0
    block_ids: list[list[int]]
    """Per KV group, the whole block table so far (0 = null block, outside a window)."""
    num_computed_tokens: int = 0
    """Tokens whose KV is in the cache already (prefix hit)."""
    side_slot: int = -1
    """Row of the side tables (counts, bias, token sets) when sampling needs them."""
    adapter: AdapterRef | None = None
    multi_modal_items: list[MultiModalItem] = []
    prompt_embeds: TensorData | None = None

    @property
    def adapter_id(self) -> int:
        """0 without an adapter."""
        return 0 if self.adapter is None else self.adapter.id


class SchedulerOutput(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One step's work."""

    step_id: int
    new: list[NewRequest] = []
    slots: list[int] = []
    """[R]"""
    num_scheduled: list[int] = []
    """[R] tokens of the row, its drafts included."""
    samples: list[bool] = []
    """[R] True when the row reaches its last known token, so that it samples."""
    num_draft: list[int] = []
    """[R] draft tokens at the row's end, to be verified; empty list when no row has any."""
    draft_token_ids: list[list[int]] = []
    """[R] values of drafts that the host made; empty list when drafts are on the device or absent."""
    block_appends: list[tuple[int, int, int, list[int]]] = []
    """(group, slot, start index in the block table, block ids). Tables only grow."""
    block_copies: list[tuple[int, int]] = []
    """(source, target): whole blocks that each worker copies before anything else of the step, in this order."""
    freed_slots: list[int] = []
    """Slots given back since the last step, before `new` is applied."""
    grammar_rows: list[int] = []
    """Rows that sample under a mask, which `Executor.sample` brings."""
    adapter_slots: list[tuple[int, int, int]] = []
    """(slot, adapter id, number of its load): adapters that come to a slot before this step."""
    dropped_adapters: list[int] = []
    """Numbers of loads that the worker may forget, once it has applied `adapter_slots`."""
    common_prefix_blocks: list[int] = []
    """Per group: leading blocks shared by every row."""
    max_query_len: int = 0
    """Upper bound over rows."""
    max_seq_len: int = 0
    """Upper bound over rows."""
    total_num_scheduled_tokens: int = 0
    extensions: dict[str, bytes] = {}
    """Plugin name to what its scheduler side sends to its worker side (KV connectors)."""


class GrammarMasks(msgspec.Struct, kw_only=True):
    """Allowed tokens of the rows in `grammar_rows`, one bit a token."""

    step_id: int
    bitmask: bytes
    """[num masks, ceil(vocab / 32)] int32, row-major, little-endian; a row with k drafts has 1 + k masks."""
    num_masks: list[int]
    """[len(grammar_rows)] 1 + drafts of each row."""
    error: str = ""
    """Why there are none: the step that waits for them fails."""
    are_placed: bool = False
    """They were written where `Executor.mask_room` said; `bitmask` is empty."""


class ModelOutput(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The result of one step."""

    step_id: int
    token_ids: list[list[int]] = []
    """[R] sampled tokens of each row: accepted drafts and one more; empty for a chunk that is not the last."""
    logprobs: dict[int, PackedLogprobs | LogprobColumns] = {}
    """By row, for rows that asked for logprobs: one position for each entry of token_ids[row]. Packed ones are passed on as they are."""
    prompt_logprobs: dict[int, PackedLogprobs | LogprobColumns] = {}
    """By row: prompt positions whose logits this step computed, in order (position p+1 predicted at p)."""
    pooled: dict[int, TensorData] = {}
    """By row: the result of a request that pools, in the step that computed its last token."""
    draft_token_ids: list[list[int]] = []
    """[R] drafts that the worker's proposer made for the next step; empty list when there is none."""
    num_draft: list[int] = []
    """[R] drafts that each row had to verify, where workers made them; empty list: as many as were scheduled."""
    row_errors: list[tuple[int, str]] = []
    """(row, message): this request failed (NaN logits, bad index); the others are fine."""
    finished_sending: list[str] = []
    finished_receiving: list[str] = []
    invalid_block_ids: list[int] = []
    """KV connector: blocks that could not be loaded."""
