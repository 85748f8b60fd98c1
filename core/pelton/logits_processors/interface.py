"""Interface of a logits processor: a plugin that changes the logits of the requests that ask for it.

A plugin offers one through the hook `pelton_logits_processors`. A request asks for it by `SamplingParams.logits_processor_args`,
or by the processor's name as a key of `extra_args` (over HTTP `vllm_xargs`). The class checks a request's argument in the front
end; every worker makes one instance.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from pelton.config import EngineConfig
    from pelton.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsProcessorContext:
    """Everything that a logits processor is made from. A new feature is a new field with a default."""

    device: torch.device
    vocab_size: int
    max_num_seqs: int
    max_model_len: int
    tokenizer_path: str | None = None
    engine_config: EngineConfig | None = None
    """All settings, for `read_settings`; None in tests of a processor alone."""


@dataclass(slots=True, kw_only=True)
class LogitsRequest:
    """A request while it has a place in the batch; made again when it resumes after a preemption. Each of n samples is one."""

    request_id: str
    args: Any
    """What the request gave the processor, checked; None for one that applies to all and was given nothing."""
    params: SamplingParams
    prompt_token_ids: Sequence[int]
    eos_token_ids: Sequence[int] = ()
    state: Any = None
    """The processor's own: made by `begin`, gone with the request."""


@dataclass(kw_only=True)
class LogitsRows:
    """The m rows of logits of one `apply`. A request with k drafts has 1 + k rows, at positions that follow each other."""

    requests: Sequence[LogitsRequest]  # [m]
    positions: (
        Tensor  # [m] int64: place of the token to be sampled, counted from the prompt's first; on the logits' device
    )
    slots: Tensor  # [m] int64, into `batch_token_ids`; on that device
    batch_token_ids: Tensor = field(
        repr=False
    )  # [S, W] int32: what came before a row's position, its drafts too. Not to be written

    def token_ids(self, row: int) -> list[int]:
        """Return the tokens before a row's position, the prompt's first. Waits for the device, where that is not this process."""
        slot, position = self._places[row]
        tokens: list[int] = self.batch_token_ids[slot, :position].tolist()
        return tokens

    def output_token_ids(self, row: int) -> list[int]:
        """Return those of `token_ids` that are behind the prompt."""
        return self.token_ids(row)[len(self.requests[row].prompt_token_ids) :]

    @cached_property
    def _places(self) -> list[tuple[int, int]]:
        return list(zip(self.slots.tolist(), self.positions.tolist(), strict=True))


class LogitsProcessor(ABC):
    """Life cycle: `check` in the front end for each request -> `begin` in a worker when it gets a place in the batch -> `apply` in
    each step that samples for it. Everything in a worker is called from one thread.

    Processors come first: masks of grammars, banned tokens, penalties and temperature are applied to what they leave, in that
    order, so that no processor lifts a ban. Logprobs are those of the model's own logits. Of several processors that of the highest
    priority is first. What one raises ends the requests that it raises for, and no other.
    """

    applies_to_all: ClassVar[bool] = False
    """Every request has it, whether it gives an argument or not. Steps sample without graphs then."""

    def __init__(self, context: LogitsProcessorContext) -> None:
        self.context = context

    @classmethod
    @abstractmethod
    def check(cls, args: Any, params: SamplingParams) -> None:
        """Refuse a bad argument (plain data, as the user sent it): raise `RequestError`; a `ValueError` or `TypeError` becomes one."""

    def begin(self, request: LogitsRequest) -> None:  # noqa: B027
        """Make `request.state`, where the processor wants one."""

    @abstractmethod
    def apply(self, logits: Tensor, rows: LogitsRows) -> Tensor:
        """Return the logits [m, V] float32 of these rows changed; -inf forbids a token. `logits` is theirs alone and may be written.

        A row's result must follow from its request and the tokens before its position: drafts are rejected, and after an exception
        rows are asked for again one request at a time. So `state` holds what is derived from the argument and the prompt.
        """
