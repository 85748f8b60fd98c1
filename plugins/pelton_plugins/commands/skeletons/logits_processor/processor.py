"""The processor: the first `count` tokens of a request's output are none of `token_ids`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import torch

from pelton.logits_processors.interface import LogitsProcessor, LogitsRequest, LogitsRows

if TYPE_CHECKING:
    from torch import Tensor

    from pelton.sampling_params import SamplingParams


class SkeletonArgs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request's argument: `logits_processor_args={"skeleton": {"token_ids": [7]}}`."""

    token_ids: list[int]
    count: int = 1


class SkeletonProcessor(LogitsProcessor):
    @classmethod
    def check(cls, args: Any, params: SamplingParams) -> None:
        given = msgspec.convert(args, SkeletonArgs)  # its errors are ValueErrors, which name the field
        if not given.token_ids or min(given.token_ids) < 0 or given.count < 1:
            raise ValueError("give token_ids, none below 0, and a count of at least 1")

    def begin(self, request: LogitsRequest) -> None:
        args = msgspec.convert(request.args, SkeletonArgs)
        known = [token for token in args.token_ids if token < self.context.vocab_size]
        request.state = torch.tensor(known, device=self.context.device), len(request.prompt_token_ids) + args.count

    def apply(self, logits: Tensor, rows: LogitsRows) -> Tensor:
        for row, request in enumerate(rows.requests):
            token_ids, end = request.state
            # On the device: asking for the position's value would wait for it.
            bias = torch.where(rows.positions[row] < end, -torch.inf, 0.0)
            logits[row, token_ids] += bias
        return logits
