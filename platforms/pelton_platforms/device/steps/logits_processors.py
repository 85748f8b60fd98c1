"""Logits processors in a step: which rows have one, and what becomes of a request whose processor raises."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from pelton import logging
from pelton.logits_processors.interface import LogitsProcessor, LogitsProcessorContext, LogitsRequest, LogitsRows
from pelton.plugins import make
from pelton.sampling.error_codes import OK, PROCESSED_WRONG

if TYPE_CHECKING:
    from pelton.messages.step import NewRequest
    from pelton_platforms.device.loaded import LoadedModel
    from pelton_platforms.device.steps.staging import StagingRing
    from pelton_platforms.device.steps.step_plan import Ints

logger = logging.get_logger(__name__)

Errors = dict[int, str]
"""By slot: why the request ends."""


def make_processors(loaded: LoadedModel) -> StepProcessors | None:
    """Make every logits processor that plugins offer; None where they offer none, or the model pools."""
    entries = loaded.plugins.entries("pelton_logits_processors") if loaded.info.pooling is None else []
    if not entries:
        return None
    context = LogitsProcessorContext(
        device=loaded.device,
        vocab_size=loaded.info.vocab_size,
        max_num_seqs=loaded.max_num_seqs,
        max_model_len=loaded.info.max_model_len,
        tokenizer_path=loaded.info.tokenizer_path,
        engine_config=loaded.config,
    )
    made = {entry.name: make(entry, LogitsProcessor, context) for entry in entries}  # type: ignore[type-abstract]
    return StepProcessors(made, loaded.max_num_seqs)


@dataclass(slots=True)
class _Places:
    """The n rows of logits of a step: where each is."""

    host_slots: Ints  # [n]
    slots: Tensor  # [n]
    positions: Tensor  # [n]
    token_ids: Tensor  # [S, W]
    staging: StagingRing


class StepProcessors:
    """The processors of a worker, and the requests of its batch that have one."""

    def __init__(self, processors: dict[str, LogitsProcessor], max_num_seqs: int) -> None:
        self._processors = processors
        self._requests: dict[str, dict[int, LogitsRequest]] = {name: {} for name in processors}  # by slot
        self._is_used = np.zeros(max_num_seqs + 1, dtype=bool)

    @property
    def names(self) -> list[str]:
        return list(self._processors)

    def add(self, new: NewRequest, errors: Errors) -> bool:
        """A request gets its slot; True where it has a processor."""
        given, slot = new.sampling_params.logits_processor_args or {}, new.slot
        self._is_used[slot] = bool(given)
        for name, requests in self._requests.items():
            requests.pop(slot, None)
            if name not in given:
                continue
            requests[slot] = LogitsRequest(
                request_id=new.request_id,
                args=given[name],
                params=new.sampling_params,
                prompt_token_ids=new.token_ids[: new.num_prompt_tokens],
                eos_token_ids=new.eos_token_ids,
            )
            try:
                self._processors[name].begin(requests[slot])
            except Exception as error:
                self._fail(name, requests[slot], slot, error, errors)
        return bool(given)

    def are_used(self, slots: Ints) -> bool:
        """Return whether some request of these slots has a processor."""
        return bool(self._is_used[slots].any())

    def process(
        self,
        logits: Tensor,
        host_slots: Ints,
        slots: Tensor,
        positions: Tensor,
        token_ids: Tensor,
        staging: StagingRing,
        errors: Errors,
    ) -> Tensor:
        """Change the rows of `logits` [n, V] whose requests have a processor, one processor after another. Returns error codes [n];
        what a processor raises goes into `errors`. host_slots: `slots` [n] as the host knows them; positions [n]: of the tokens to
        be sampled; token_ids [S, W] by slot."""
        places = _Places(host_slots, slots, positions, token_ids, staging)
        codes = torch.full_like(positions, OK)
        for name, requests in self._requests.items():
            rows = np.array([row for row, slot in enumerate(host_slots.tolist()) if slot in requests], dtype=np.int64)
            rows = rows[[int(slot) not in errors for slot in host_slots[rows]]]
            if not len(rows):
                continue
            (index,) = staging.stage([rows])
            changed = self._try(name, logits, rows, places, errors)
            logits[index] = changed
            # -inf alone is not the processor's fault: it has forbidden every token.
            codes[index] = torch.where(changed.amax(dim=-1) < torch.inf, codes[index], PROCESSED_WRONG)
        return codes

    def _try(self, name: str, logits: Tensor, rows: Ints, places: _Places, errors: Errors) -> Tensor:
        """All rows at once; where that raises, those of one request at a time, to find whose fault it is."""
        try:
            return self._apply(name, logits, rows, places)
        except Exception as error:
            slots = np.unique(places.host_slots[rows])
            if len(slots) == 1:
                self._fail(name, self._requests[name][int(slots[0])], int(slots[0]), error, errors)
                return self._rows(logits, rows, places)
        found = self._rows(logits, rows, places)
        for slot in slots:
            (mine,) = np.nonzero(places.host_slots[rows] == slot)
            first = int(mine[0])  # rows of a request follow each other
            found[first : first + len(mine)] = self._try(name, logits, rows[mine], places, errors)
        return found

    @staticmethod
    def _rows(logits: Tensor, rows: Ints, places: _Places) -> Tensor:
        """A copy of some rows of logits."""
        (index,) = places.staging.stage([rows])
        return logits[index]

    def _apply(self, name: str, logits: Tensor, rows: Ints, places: _Places) -> Tensor:
        requests = self._requests[name]
        (index,) = places.staging.stage([rows])
        given = logits[index]
        shape, dtype = given.shape, given.dtype
        changed = self._processors[name].apply(
            given,
            LogitsRows(
                requests=[requests[int(slot)] for slot in places.host_slots[rows]],
                positions=places.positions[index],
                slots=places.slots[index],
                batch_token_ids=places.token_ids,
            ),
        )
        if not isinstance(changed, Tensor) or changed.shape != shape or changed.dtype != dtype:
            what = f"{changed.dtype} {list(changed.shape)}" if isinstance(changed, Tensor) else repr(changed)
            raise TypeError(f"apply returns {what}; expected {dtype} {list(shape)}")
        return changed

    @staticmethod
    def _fail(name: str, request: LogitsRequest, slot: int, error: Exception, errors: Errors) -> None:
        errors[slot] = f"Logits processor {name!r} fails for this request: {type(error).__name__}: {error}"
        logger.error("Logits processor %r fails for request %s.", name, request.request_id, exc_info=error)
