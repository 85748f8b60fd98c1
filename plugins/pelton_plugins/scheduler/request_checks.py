"""Checks of new requests: refuse requests that can never run here, and those that may not wait now."""

from __future__ import annotations

from dataclasses import dataclass

from pelton.config import SchedulerConfig
from pelton.errors import NotSupportedError, QueueFullError, RequestError
from pelton.kv_cache.interface import KVCacheManager
from pelton.messages.request import EngineRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionLimits:
    config: SchedulerConfig
    kv: KVCacheManager
    max_model_len: int
    max_num_batched_tokens: int
    has_grammars: bool
    has_adapters: bool
    has_connector: bool
    is_pooling: bool = False
    takes_prompt_embeds: bool = False

    def check(self, request: EngineRequest, num_queued_reqs: int, num_queued_tokens: int) -> None:
        """Raises `RequestError`. num_queued: what waits already, and has never run."""
        num_prompt = len(request.prompt_token_ids)
        self._check_prompt(num_prompt, num_new=0 if request.pooling_params is not None else 1)
        if request.sampling_params.structured_outputs is not None and not self.has_grammars:
            raise NotSupportedError(
                "structured_outputs needs a structured-output backend, and no plugin offers one here.",
                param="structured_outputs",
            )
        self._check_features(request)
        limit = self.config.max_num_queued_reqs
        if limit is not None and num_queued_reqs >= limit:
            raise QueueFullError(
                f"{num_queued_reqs} requests wait already; at most {limit}. Try again later.",
                param="max_num_queued_reqs",
                value=limit,
            )
        limit = self.config.max_num_queued_tokens
        # A prompt of more tokens than may wait is taken when nothing waits: later would be no better.
        if limit is not None and num_queued_tokens and num_queued_tokens + num_prompt > limit:
            raise QueueFullError(
                f"{num_queued_tokens} prompt tokens wait already and this request has {num_prompt}; at most {limit}. "
                "Try again later.",
                param="max_num_queued_tokens",
                value=limit,
            )

    def _check_features(self, request: EngineRequest) -> None:
        """Refuse what this engine does not offer."""
        if request.pooling_params is None and self.is_pooling:
            raise NotSupportedError("This engine pools; send a request with pooling_params.", param="pooling_params")
        if request.pooling_params is not None and not self.is_pooling:
            raise NotSupportedError("This engine does not pool; send a request to generate.", param="pooling_params")
        if request.multi_modal_items:
            kinds = ", ".join(sorted({item.kind for item in request.multi_modal_items}))
            raise NotSupportedError(f"This model reads text only; leave out: {kinds}.", param="multi_modal_items")
        if request.prompt_embeds is not None and not self.takes_prompt_embeds:
            raise NotSupportedError("This engine takes no embeddings; send token ids.", param="prompt_embeds")
        if request.adapter is not None and not self.has_adapters:
            raise NotSupportedError("This engine serves no adapters.", param="adapter", value=request.adapter.name)
        if request.kv_transfer_params is not None and not self.has_connector:
            raise NotSupportedError(
                "No KV connector runs here; leave kv_transfer_params out.", param="kv_transfer_params"
            )

    def _check_prompt(self, num_prompt: int, num_new: int) -> None:
        """num_new: tokens that the request generates at least."""
        if not num_prompt:
            raise RequestError("The prompt is empty; give at least one token.", param="prompt")
        if num_prompt + num_new > self.max_model_len:
            beside = " with one token to generate" if num_new else ""
            raise RequestError(
                f"The prompt has {num_prompt} tokens; at most {self.max_model_len - num_new} fit the context of "
                f"{self.max_model_len}{beside}.",
                param="prompt",
            )
        if not self.config.enable_chunked_prefill and num_prompt > self.max_num_batched_tokens:
            raise RequestError(
                f"The prompt has {num_prompt} tokens; without chunked prefill at most {self.max_num_batched_tokens} "
                "(max_num_batched_tokens) can run.",
                param="prompt",
            )
        needed = self.kv.max_blocks_needed(num_prompt + num_new)
        if needed > self.kv.num_usable_blocks:
            raise RequestError(
                f"The prompt has {num_prompt} tokens and needs {needed} blocks of KV cache; there are "
                f"{self.kv.num_usable_blocks}. Shorten it, or raise kv_cache_memory_bytes.",
                param="prompt",
            )
