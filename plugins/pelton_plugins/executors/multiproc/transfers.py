"""`JoinedTransfers`: the ranks' halves of a KV connector, as the scheduler hears of them."""

from __future__ import annotations

from pelton.messages.step import ModelOutput


def transfers_alone(output: ModelOutput) -> ModelOutput:
    """Return what a rank says of its transfers, without the rest of a step's result."""
    return ModelOutput(
        step_id=output.step_id, finished_sending=output.finished_sending, finished_receiving=output.finished_receiving,
        invalid_block_ids=output.invalid_block_ids,
    )  # fmt: skip


class JoinedTransfers:
    """A transfer is over when it is for every rank; a block is invalid where one rank could not load its part."""

    def __init__(self, size: int, telling_rank: int) -> None:
        self._size, self._telling_rank = size, telling_rank
        self._outputs: dict[int, dict[int, ModelOutput]] = {}  # by step, then by rank
        self._over: tuple[dict[str, int], dict[str, int]] = {}, {}  # sending, receiving: how many ranks have said so
        self._ended: tuple[list[str], list[str]] = [], []  # the same of all ranks, not told yet

    def take(self, rank: int, output: ModelOutput, *, is_open: bool) -> ModelOutput | None:
        """Take one rank's result of a step. Return the step's, with the last one. is_open: the step's result is waited for."""
        lists = output.finished_sending, output.finished_receiving
        for over, ended, names in zip(self._over, self._ended, lists, strict=True):
            for name in names:
                over[name] = over.get(name, 0) + 1
                if over[name] == self._size:
                    del over[name]
                    ended.append(name)
        if not is_open:
            return None
        outputs = self._outputs.setdefault(output.step_id, {})
        outputs[rank] = output
        if len(outputs) < self._size:
            return None
        del self._outputs[output.step_id]
        told = outputs[self._telling_rank]
        told.finished_sending, told.finished_receiving = self._ended
        self._ended = [], []
        told.invalid_block_ids = sorted({block for each in outputs.values() for block in each.invalid_block_ids})
        return told

    def forget(self, step_id: int) -> None:
        """Forget a step that has failed."""
        self._outputs.pop(step_id, None)
