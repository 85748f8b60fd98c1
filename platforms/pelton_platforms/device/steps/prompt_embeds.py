"""Prompts given as embeddings: rows that take the place of what the model's token embedding puts out.

They stay on the device from a request's first step until its prompt is computed. A step that reads some of them runs without a
graph; no other step has anything to do with them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from pelton.errors import ConfigError
from pelton.layers.embedding import VocabEmbedding

if TYPE_CHECKING:
    from pelton.messages.request import TensorData
    from pelton.messages.step import SchedulerOutput
    from pelton_platforms.device.loaded import LoadedModel
    from pelton_platforms.device.steps.batch_state import HostColumns
    from pelton_platforms.device.steps.staging import StagingRing
    from pelton_platforms.device.steps.step_plan import StepPlan


class PromptEmbeds:
    """One worker's. `update` comes before each step, `placed` around the forward pass of those that read them."""

    def __init__(self, embedding: nn.Module, device: torch.device, dtype: torch.dtype, *, is_first_rank: bool) -> None:
        """is_first_rank: the sum over ranks is this one's rows; others put out zeros."""
        self._device, self._dtype, self._is_first_rank = device, dtype, is_first_rank
        self._by_slot: dict[int, Tensor] = {}  # [T, H] of prompts that are not computed yet
        self._step: tuple[Tensor, Tensor] | None = None  # places [k] int64 among the step's tokens, rows [k, H]
        embedding.register_forward_hook(self._replace)

    def update(self, output: SchedulerOutput) -> None:
        if self._by_slot:
            for slot in output.freed_slots:
                self._by_slot.pop(slot, None)
        for request in output.new:
            if request.prompt_embeds is not None:
                self._by_slot[request.slot] = self._load(request.prompt_embeds)
            elif self._by_slot:
                self._by_slot.pop(request.slot, None)

    def _load(self, given: TensorData) -> Tensor:
        rows = torch.frombuffer(bytearray(given.data), dtype=getattr(torch, given.dtype)).view(given.shape)
        if self._device.type != "cpu":
            rows = rows.pin_memory()
        return rows.to(self._device, non_blocking=True).to(self._dtype)

    def are_read(self, slots: Sequence[int]) -> bool:
        """Return whether a step of these rows reads any."""
        return bool(self._by_slot) and not self._by_slot.keys().isdisjoint(slots)

    @contextmanager
    def placed(self, plan: StepPlan, host: HostColumns, staging: StagingRing) -> Iterator[None]:
        """Let the embedding put out the rows that the step reads."""
        places: list[np.ndarray] = []
        rows: list[Tensor] = []
        for row, slot in enumerate(plan.slots.tolist()):
            given = self._by_slot.get(slot)
            if given is None:
                continue
            first, count = int(host.num_computed_tokens[slot]), int(plan.num_scheduled[row])
            num_read = min(first + count, len(given)) - first
            if num_read > 0:
                start = int(plan.query_start_loc[row])
                places.append(np.arange(start, start + num_read))
                rows.append(given[first : first + num_read])
            if first + count >= len(given):
                del self._by_slot[slot]
        if places:
            (staged,) = staging.stage([np.concatenate(places)])
            self._step = staged, torch.cat(rows)
        try:
            yield
        finally:
            self._step = None

    def _replace(self, module: nn.Module, inputs: tuple[Any, ...], hidden: Tensor) -> Tensor | None:
        """The forward hook of the embedding; in place."""
        if self._step is None:
            return None
        places, rows = self._step
        if self._is_first_rank:
            hidden.index_copy_(0, places, rows)
        else:
            hidden.index_fill_(0, places, 0)
        return hidden


def make_prompt_embeds(loaded: LoadedModel) -> PromptEmbeds | None:
    """None where the settings do not ask for it. Raises `ConfigError` for a model whose layers read tokens beside embeddings."""
    if not loaded.config.model.enable_prompt_embeds or loaded.info.is_pooling:
        return None
    parallel = loaded.build.parallel
    embeddings = [module for module in loaded.model.modules() if isinstance(module, VocabEmbedding)]
    if len(embeddings) != 1:
        raise ConfigError(
            f"enable_prompt_embeds is set, but layers of {loaded.info.architecture} read more of a token than its embedding. "
            "Leave it off."
        )
    dtype = getattr(torch, loaded.info.dtype)
    return PromptEmbeds(embeddings[0], loaded.device, dtype, is_first_rank=parallel.rank == 0)
