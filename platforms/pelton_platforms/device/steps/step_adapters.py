"""Interface of adapters in a step: what makes of each row's adapter what the layers read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from pelton.messages.request import AdapterRef
    from pelton.worker.inputs import InputBuffers, StepShape


class StepAdapters(Protocol):
    """`StepOps.adapters` and `BatchState.adapters` hold one; all calls come from the worker's thread."""

    def slot_of(self, adapter: AdapterRef) -> int:
        """The place on the device of an adapter whose request gets its slot of the batch. It has been loaded."""
        ...

    def prepare(self, slots: Tensor, shape: StepShape, buffers: InputBuffers, *, is_used: bool) -> Any:
        """Called in front of every forward pass, behind `prepare_inputs`, as a part of what is captured; returns what
        `ForwardBatch.adapter` is to be.

        slots [R] int64; the places of their adapters are `BatchState.adapter_slots[slots]`, -1 without one. is_used False: no row
        has one, and the layers must add nothing; another graph is captured for such steps.
        """
        ...
