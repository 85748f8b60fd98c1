"""The two seams that the runner calls itself: a step's inputs, and the tail of a step whose rows each take one token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pelton.ops.interface import (
    PrepareInputs,
    PrepareInputsNeeds,
    PrepareInputsTensors,
    Sample,
    SampleNeeds,
    SampleTensors,
)
from pelton.ops.selector import OpSelector
from pelton.worker.batch_state import BatchState
from pelton.worker.inputs import InputBuffers

VARIANTS = ("greedy", "full")


@dataclass(slots=True)
class StepOps:
    """Bound to one batch state and its buffers."""

    prepare_inputs: PrepareInputs
    sample: Mapping[str, Sample]  # by variant


def bind_step_ops(ops: OpSelector, state: BatchState, buffers: InputBuffers) -> StepOps:
    needs = PrepareInputsNeeds(
        max_num_tokens=buffers.max_num_tokens,
        max_num_seqs=state.max_num_seqs,
        block_sizes=state.block_sizes,
        max_model_len=state.max_model_len,
    )
    sample = {
        variant: ops.bind(
            "sample",
            SampleNeeds(vocab_size=state.vocab_size, max_num_seqs=state.max_num_seqs, variant=variant),
            SampleTensors(state),
        )
        for variant in VARIANTS
    }
    return StepOps(ops.bind("prepare_inputs", needs, PrepareInputsTensors(state, buffers)), sample)
