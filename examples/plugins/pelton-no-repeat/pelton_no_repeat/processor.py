"""A logits processor: no n tokens in a row occur twice in a text, as `no_repeat_ngram_size` of transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from pelton.errors import RequestError
from pelton.logits_processors.interface import LogitsProcessor, LogitsRows

if TYPE_CHECKING:
    from torch import Tensor

    from pelton.sampling_params import SamplingParams

MOST = 64


class NoRepeat(LogitsProcessor):
    """A request's argument is n."""

    @classmethod
    def check(cls, args: Any, params: SamplingParams) -> None:
        if type(args) is not int or not 1 <= args <= MOST:
            raise RequestError(
                f"logits_processor_args.no_repeat must be an integer from 1 to {MOST}",
                param="logits_processor_args.no_repeat", value=args,
            )  # fmt: skip

    def apply(self, logits: Tensor, rows: LogitsRows) -> Tensor:
        for row, request in enumerate(rows.requests):
            forbidden = followers(rows.token_ids(row), request.args)
            logits[row, torch.tensor(forbidden, dtype=torch.int64, device=logits.device)] = -torch.inf
        return logits


def followers(tokens: list[int], n: int) -> list[int]:
    """Return the tokens that followed the last n - 1 ones where these stood before."""
    prefix = tokens[len(tokens) - (n - 1) :]
    return [tokens[i + n - 1] for i in range(len(tokens) - n + 1) if tokens[i : i + n - 1] == prefix]
