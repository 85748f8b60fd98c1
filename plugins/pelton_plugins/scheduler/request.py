"""The scheduler's own record of one request, from arrival to its last token.

It fulfils `CacheableRequest` of the KV-cache manager and `ScheduledRequest` of policies and gates. The record is plain state: what
happens to it is decided by the parts of `scheduler.py`, who comes first by the policy.
"""

from __future__ import annotations

from typing import Any

from pelton.kv_cache.hashing import BlockHasher, pack_tokens, placeholder_hashes
from pelton.messages.outputs import EngineEvent, PackedLogprobs
from pelton.messages.request import EngineRequest
from pelton.scheduler.request import RequestStatus


class RequestState:
    """State of one request.

    Known tokens have their value on the host; pending ones are sampled by open steps (an upper bound: a step with
    drafts may bring fewer). `num_computed_tokens` is an upper bound too; `num_confirmed_tokens` is what holds if every
    open draft is rejected.
    """

    __slots__ = (
        "arrival",
        "block_hashes",
        "capacity",
        "connector_tokens",
        "deadline",
        "discard_logprobs_through_step",
        "discard_through_step",
        "draft_rate",
        "drafts",
        "eos_ids",
        "events",
        "extra_hashes",
        "fast_decode_until",
        "grammar",
        "grammar_job",
        "has_valid_output",
        "is_remote_ready",
        "kept_states",
        "kv_transfer_params",
        "last_step_id",
        "late_mask_at",
        "late_masks",
        "max_total_tokens",
        "min_tokens",
        "needs_side_slot",
        "next_event_len",
        "no_drafts_until",
        "num_cached_blocks",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_external_tokens",
        "num_found_tokens",
        "num_prompt_tokens",
        "num_tokens_with_pending",
        "num_unconfirmed_tokens",
        "only_samples",
        "packed_token_ids",
        "pools",
        "prompt_logprobs",
        "request",
        "request_id",
        "restarts",
        "side_slot",
        "skip_connector",
        "skip_prefix_lookup",
        "slot",
        "status",
        "stop_ids",
        "tables",
        "token_ids",
    )  # fmt: skip

    def __init__(self, request: EngineRequest, arrival: int, *, max_model_len: int, now: float) -> None:
        params = request.sampling_params
        self.request = request
        self.request_id = request.request_id
        self.arrival = arrival
        self.status = RequestStatus.WAITING
        self.token_ids = request.prompt_token_ids  # until `own_token_ids`: a long prompt is not copied while it waits
        self.num_prompt_tokens = len(self.token_ids)
        limit = max_model_len if params.max_tokens is None else self.num_prompt_tokens + params.max_tokens
        self.max_total_tokens = min(limit, max_model_len)
        pooling = request.pooling_params
        self.pools = pooling is not None
        if self.pools:  # the step that computes the last token is the last
            self.max_total_tokens = self.num_prompt_tokens + 1
        self.min_tokens = self.num_prompt_tokens + params.min_tokens  # in all, so that one comparison does
        self.eos_ids = frozenset(() if params.ignore_eos else request.eos_token_ids)
        self.stop_ids = self.eos_ids.union(params.stop_token_ids or ())
        self.deadline = None if request.timeout_s is None else now + request.timeout_s

        self.num_tokens_with_pending = self.num_prompt_tokens  # known and pending tokens
        self.num_computed_tokens = 0
        self.num_unconfirmed_tokens = 0  # of them, what open steps may take back
        self.last_step_id = -1
        self.discard_through_step = -1  # results of steps up to this one are discarded
        self.discard_logprobs_through_step = -1  # the same for their prompt logprobs: the prompt starts again
        self.needs_side_slot = params.needs_side_slot
        self.only_samples = not (
            self.needs_side_slot
            or params.logprobs is not None
            or params.structured_outputs
            or params.logits_processor_args
        )
        self.drafts: list[int] = []  # values known on the host, for the next step
        self.draft_rate = 1.0  # running mean of the share of its drafts that was accepted
        self.no_drafts_until = 0  # with fewer known and pending tokens it makes none
        self.has_valid_output = False  # a token was sampled since it began: what was computed until then is finite

        self.slot = -1
        self.side_slot = -1
        self.capacity = 0  # tokens that the held blocks have room for
        self.tables: list[list[int]] = []  # block table per group as the workers have it: it only grows
        self.kept_states: list[tuple[int, int]] = []  # (tokens, block) of states that it found, or that are kept of it
        self.block_hashes: list[bytes] = []
        self.packed_token_ids = b""  # `pack_tokens` of the known tokens, while it is admitted
        self.extra_hashes: dict[int, list[str]] | None = None  # of items and embeddings, by block; None: not hashed yet
        # The fast paths of decode, written by `plan_decode`, `plan_next_event` and `leave_fast_paths` alone:
        self.fast_decode_until = 0  # with fewer known and pending tokens, a step gives it one token without a new block
        self.next_event_len = (
            0  # with fewer known tokens, a token that is not a stop token ends nothing and fills no block
        )
        self.num_cached_blocks = 0  # full blocks of known tokens made findable so far
        self.num_found_tokens = 0  # found in the prefix cache this time
        self.num_cached_tokens = -1  # found, or brought by a connector, at the first scheduling; -1 before it
        self.num_external_tokens = 0  # of them, brought by a connector
        self.skip_prefix_lookup = params.prompt_logprobs is not None
        if pooling is not None and pooling.skip_reading_prefix_cache:
            self.skip_prefix_lookup = True

        self.events: list[EngineEvent] = []
        self.prompt_logprobs: list[PackedLogprobs] = []  # collected so far, until sent
        self.grammar: Any = None  # a `structured.interface.Grammar` once compiled
        self.grammar_job: Any = None  # the future that compiles it, or makes a mask that is late
        self.late_mask_at = -1  # known tokens when its mask was late last
        self.late_masks: Any = None  # that mask, [1 + drafts, words], until a step takes it
        self.connector_tokens = 0  # arriving from a KV connector
        self.is_remote_ready = False
        self.restarts = False  # what it receives is of no use any more
        self.skip_connector = False  # a load failed: compute here instead
        self.kv_transfer_params: dict[str, Any] | None = None  # what the connector says of it, at its end

    @property
    def num_tokens(self) -> int:
        """Known on the host: prompt and output."""
        return len(self.token_ids)

    @property
    def is_in_decode(self) -> bool:
        """True when the next row is one token."""
        return self.num_tokens_with_pending - self.num_computed_tokens == 1

    @property
    def num_pending(self) -> int:
        """Sampled by open steps: an upper bound."""
        return self.num_tokens_with_pending - len(self.token_ids)

    @property
    def num_confirmed_tokens(self) -> int:
        """Lower bound of the computed tokens."""
        return self.num_computed_tokens - self.num_unconfirmed_tokens

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    @property
    def is_receiving(self) -> bool:
        """True while a KV connector writes to its blocks."""
        return self.status is RequestStatus.RECEIVING and not self.is_remote_ready

    def plan_decode(self) -> None:
        """Enter the fast path of `schedule`: one token a step while the held blocks have room."""
        self.fast_decode_until = min(self.capacity + 1, self.max_total_tokens)

    def plan_next_event(self, block_size: int, *, is_plain: bool) -> None:
        """Enter the fast path of `update`, up to the token that ends the request or fills its next block.

        block_size: tokens of a block that the prefix cache hashes; 0 without prefix caching. is_plain: False for a request
        whose every result has to be looked at.
        """
        if not is_plain:
            self.next_event_len = 0
            return
        event = self.max_total_tokens
        if block_size:
            event = min(event, (self.num_cached_blocks + 1) * block_size)
        self.next_event_len = event - 1

    def leave_fast_paths(self) -> None:
        """Every later step and result takes the general path, until it is planned again."""
        self.fast_decode_until = self.next_event_len = 0

    def forget_computed(self) -> None:
        """Blocks and slot are given up: everything has to be computed again."""
        if self.num_computed_tokens < self.num_prompt_tokens:
            self.prompt_logprobs = []
            self.discard_logprobs_through_step = self.last_step_id
        self.num_computed_tokens = 0
        self.num_unconfirmed_tokens = 0
        self.has_valid_output = False
        self.leave_fast_paths()
        self.num_cached_blocks = 0
        self.capacity = 0
        self.tables = []
        self.kept_states = []
        self.num_found_tokens = 0
        self.drafts = []
        self.is_remote_ready = False
        self.connector_tokens = 0

    def own_token_ids(self) -> list[int]:
        """Return `token_ids` to append to, a copy of the prompt first."""
        if self.token_ids is self.request.prompt_token_ids:
            self.token_ids = list(self.token_ids)
        return self.token_ids

    def pack(self) -> None:
        """Make `packed_token_ids`, once for all who ask until `take_packed`: turning a long list into numbers takes longest."""
        if len(self.packed_token_ids) != 8 * len(self.token_ids):
            self.packed_token_ids = pack_tokens(self.token_ids)

    def take_packed(self) -> bytes:
        """Hand over `packed_token_ids`."""
        packed, self.packed_token_ids = self.packed_token_ids, b""
        return packed

    def extend_hashes(self, hasher: BlockHasher, *, only_first: bool = False) -> None:
        """Hash the known tokens' full blocks that have no hash yet, or the first of them alone."""
        token_ids, packed = self.token_ids, self.packed_token_ids
        if only_first:
            token_ids, packed = token_ids[: hasher.block_size], packed[: 8 * hasher.block_size]
        request = self.request
        if self.extra_hashes is None:
            self.extra_hashes = placeholder_hashes(request.placeholders(), hasher.block_size)
        hasher.extend(
            self.block_hashes, token_ids, adapter_id=request.adapter_id,
            block_extra_hashes=self.extra_hashes, cache_salt=request.cache_salt,
            packed=packed if len(packed) == 8 * len(token_ids) else None,
        )  # fmt: skip

    def __repr__(self) -> str:
        return (
            f"RequestState({self.request_id!r}, {self.status.name}, tokens={len(self.token_ids)}+{self.num_pending}, "
            f"computed={self.num_computed_tokens}, slot={self.slot})"
        )
