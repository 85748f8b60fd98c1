"""Numbers of a step that its time follows from."""

from __future__ import annotations

from typing import NamedTuple

from pelton.messages.step import SchedulerOutput


class StepRows(NamedTuple):
    num_decode_rows: int
    decode_context: int
    """Tokens before those rows' own."""
    num_prompt_rows: int
    num_prompt_tokens: int
    prompt_pairs: float
    """Of a prompt's token and one before it, which its attention multiplies."""


def count_rows(output: SchedulerOutput, context: dict[int, int]) -> StepRows:
    """Count what a step computes. context: computed tokens by slot, brought behind the step."""
    for new in output.new:
        context[new.slot] = new.num_computed_tokens
    decode_rows = decode_context = prompt_rows = prompt_tokens = 0
    pairs = 0.0
    for slot, count in zip(output.slots, output.num_scheduled, strict=True):
        start = context[slot]
        context[slot] = start + count
        if count == 1:
            decode_rows += 1
            decode_context += start
        else:
            prompt_rows += 1
            prompt_tokens += count
            pairs += count * (start + count / 2)
    return StepRows(decode_rows, decode_context, prompt_rows, prompt_tokens, pairs)
