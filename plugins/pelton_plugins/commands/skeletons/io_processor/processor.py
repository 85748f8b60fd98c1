"""From a client's `data` to prompts, and from their vectors to an answer of its own form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from pelton import PoolingRequestOutput
from pelton.engine.input_processor import Prompt
from pelton.errors import RequestError
from pelton.outputs import PoolingOutput
from pelton.pooling.io_processor import IOProcessor, IOProcessorContext


class SkeletonRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Request as a client sends it."""

    token_ids: list[int]


class SkeletonAnswer(msgspec.Struct, kw_only=True):
    """Answer that a client gets."""

    norm: float


class SkeletonProcessor(IOProcessor[SkeletonRequest, SkeletonAnswer]):
    """One prompt for each request."""

    def __init__(self, context: IOProcessorContext) -> None:
        super().__init__(context)
        self._vocab_size, self._max_tokens = context.model.vocab_size, context.model.max_model_len

    def parse_data(self, data: object) -> SkeletonRequest:
        try:
            request = msgspec.convert(data, SkeletonRequest)
        except msgspec.ValidationError as error:
            raise RequestError(f"data is not right: {error}", param="data") from None
        if not 1 <= len(request.token_ids) <= self._max_tokens:
            raise RequestError(f"data.token_ids needs 1 to {self._max_tokens} ids", param="data.token_ids")
        if not all(0 <= token < self._vocab_size for token in request.token_ids):
            raise RequestError(f"data.token_ids must be from 0 to {self._vocab_size - 1}", param="data.token_ids")
        return request

    def pre_process(self, prompt: SkeletonRequest, request_id: str | None = None, **kwargs: Any) -> Sequence[Prompt]:
        return [prompt.token_ids]

    def post_process(
        self, model_output: Sequence[PoolingRequestOutput[PoolingOutput]], request_id: str | None = None, **kwargs: Any
    ) -> SkeletonAnswer:
        return SkeletonAnswer(norm=float(np.linalg.norm(model_output[0].outputs.data)))
