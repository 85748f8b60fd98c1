"""Structured output in the step loop: a request waits for its grammar, its rows get masks, its tokens advance it."""

from __future__ import annotations

from pelton.errors import EngineError
from pelton.messages.outputs import FinishReason
from pelton.messages.step import GrammarMasks
from pelton_plugins.scheduler.request import RequestState
from pelton_plugins.scheduler.request_table import RequestTable
from pelton_plugins.scheduler.step import OpenStep


def is_compiled(request: RequestState) -> bool:
    """False while the grammar is being compiled; raises what is wrong with the constraint."""
    if request.grammar_job is not None:
        if not request.grammar_job.done():
            return False
        request.grammar = request.grammar_job.result()
        request.grammar_job = None
    return True


def make_masks(step: OpenStep, vocab_size: int, table: RequestTable) -> GrammarMasks:
    """Masks of the step's grammar rows; a request whose mask cannot be made ends."""
    output = step.output
    num_bytes = 4 * ((vocab_size + 31) // 32)  # a mask
    bitmask = bytearray()
    num_masks = []
    for row in output.grammar_rows:
        request = step.requests[row]
        num_rows = 1 + (output.num_draft[row] if output.num_draft else 0)
        masks = bytearray(b"\xff" * (num_bytes * num_rows))  # kept for a request that ended meanwhile
        if not request.is_finished and output.step_id > request.discard_through_step:
            try:
                for position in range(num_rows):
                    view = memoryview(masks)[num_bytes * position : num_bytes * (position + 1)]
                    request.grammar.fill_bitmask(view, request.drafts[:position])
            except Exception as error:
                table.fail(request, error, "making the grammar mask of")
        bitmask += masks
        num_masks.append(num_rows)
    return GrammarMasks(step_id=output.step_id, bitmask=bytes(bitmask), num_masks=num_masks)


def advance(request: RequestState, tokens: list[int], reason: FinishReason | None) -> FinishReason | None:
    """Take in tokens of a constrained request; the reason to stop, its own when the text is complete."""
    # EOS is not part of the constrained text.
    inside = tokens[:-1] if tokens[-1] in request.eos_ids and reason is FinishReason.STOP else tokens
    if inside and not request.grammar.accept(inside):
        raise EngineError(f"Tokens {inside} break the request's grammar.")
    if reason is None and not request.eos_ids and request.grammar.is_terminated():
        return FinishReason.STOP
    return reason
