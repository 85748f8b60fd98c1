"""Memory of a fake device: rows with their block tables, and blocks with a running hash per token slot, or one as a state.

It checks all that it is told: who writes where, and whether each row reads the hashes of its own tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pelton.kv_cache.spec import KVCacheSpec, SlidingWindowSpec
from pelton.messages.step import NewRequest, SchedulerOutput
from pelton.testing.fake_model import extend_hash, running_hashes

JUNK = -1  # what a failed step or load leaves in the blocks it wrote


@dataclass(eq=False)
class FakeRow:
    """One request on the device."""

    new: NewRequest
    tokens: list[int]
    hashes: list[int]  # running hash through each token
    num_computed: int
    tables: list[list[int]]
    drafts: list[int] = field(default_factory=list)
    is_spoilt: bool = False  # it has read junk: what it samples must not be used

    def append(self, token: int) -> None:
        self.hashes.append(extend_hash(self.hashes[-1], token))
        self.tokens.append(token)


def num_new_and_draft(output: SchedulerOutput, row: int) -> tuple[int, int]:
    """How many of a row's scheduled tokens are known, and how many are drafts."""
    num_draft = output.num_draft[row] if output.num_draft else 0
    return output.num_scheduled[row] - num_draft, num_draft


class FakeStore:
    """A step is `update`, `write`, `read`; `retire` when its result was taken. What was wrong is added to `violations`."""

    def __init__(self, violations: list[str], *, steps_are_ordered: bool) -> None:
        self.specs: list[KVCacheSpec] = []  # one a group, set before the first step
        self.slots: dict[int, FakeRow] = {}
        self.num_computed_tokens = 0  # tokens that went through the fake model
        self._violations = violations
        self._steps_are_ordered = steps_are_ordered
        self._blocks: dict[tuple[int, int], list[int]] = {}  # (group, block) -> running hash per token slot
        self._states: dict[int, int] = {}  # block -> running hash through the last token of who computes on it
        self._touched: dict[int, tuple[set[int], dict[int, set[str]]]] = {}  # step -> (slots, block -> request ids)

    def update(self, output: SchedulerOutput) -> list[FakeRow]:
        """Take in what has changed since the last step. Returns the step's rows."""
        step = output.step_id
        for source, target in output.block_copies:
            if source not in self._states:
                self._violations.append(f"step {step} copies block {source}, which holds no state")
            self._put_state(target, self._states.get(source, JUNK))
        in_open_steps = set[int]().union(*(slots for slots, _ in self._touched.values()))
        for slot in output.freed_slots:
            self.slots.pop(slot, None)
        for new in output.new:
            if new.slot in self.slots:
                self._violations.append(f"step {step} gives slot {new.slot} to two requests")
            if not self._steps_are_ordered and new.slot in in_open_steps:
                self._violations.append(f"step {step} gives slot {new.slot} away under an open step")
            if new.num_computed_tokens >= len(new.token_ids):
                self._violations.append(f"{new.request_id} starts with nothing to compute")
            self.slots[new.slot] = FakeRow(
                new, list(new.token_ids), running_hashes(new.token_ids), new.num_computed_tokens,
                [list(ids) for ids in new.block_ids],
            )  # fmt: skip
        for group, slot, start, block_ids in output.block_appends:
            table = self.slots[slot].tables[group]
            if len(table) != start:
                self._violations.append(f"step {step} appends at {start} to a table of {len(table)} blocks")
            table += block_ids
        return [self.slots[slot] for slot in output.slots]

    def write(self, output: SchedulerOutput, rows: Sequence[FakeRow], *, junk: bool) -> None:
        """All rows write their KV before any row reads. A step that fails writes `junk`."""
        written: set[tuple[int, int, int]] = set()
        held: dict[int, set[str]] = {}
        for _, target in output.block_copies if junk else ():
            self._put_state(target, JUNK)
        for place, row in enumerate(rows):
            if row.is_spoilt:
                self._write_junk(row)  # after a failed step its counts are not the scheduler's any more
                continue
            num_new, num_draft = num_new_and_draft(output, place)
            if not self._check_counts(output, row, num_new, num_draft, samples=output.samples[place]):
                continue
            self.num_computed_tokens += num_new
            if num_draft:
                given = output.draft_token_ids[place] if output.draft_token_ids else row.drafts[:num_draft]
                row.drafts = [*given, *[-1] * (num_draft - len(given))]
            if not all(self._write_state(row, group, num_new, junk=junk) for group in self._state_groups(row)):
                row.is_spoilt = True
                continue
            values = row.hashes[row.num_computed : row.num_computed + num_new]
            for token in row.drafts[:num_draft]:
                values.append(extend_hash(values[-1], token))
            for group in self._token_groups(row):
                self._hold(row, group, len(values), held)
                self._write_values(output, row, group, [JUNK] * len(values) if junk else values, written)
            row.is_spoilt = junk
        if max(output.num_scheduled, default=0) == 1:
            self._check_apart(output, rows, {(group, block) for group, block, _ in written})
        if not self._steps_are_ordered:
            self._touched[output.step_id] = (set(output.slots), held)

    def read(self, output: SchedulerOutput, rows: Sequence[FakeRow]) -> None:
        """Check that each row attends to its own tokens."""
        for place, row in enumerate(rows):
            if row.is_spoilt:
                continue
            last = min(row.num_computed + num_new_and_draft(output, place)[0], len(row.tokens))
            for group in self._token_groups(row):
                table, size = row.tables[group], self.specs[group].block_size
                for position in range(self._first_read(group, row.num_computed), last):
                    block = table[position // size] if position // size < len(table) else 0
                    found = self._blocks.get((group, block), [0] * size)[position % size]
                    if found == JUNK:
                        row.is_spoilt = True
                        break
                    if found != row.hashes[position]:
                        self._violations.append(
                            f"{row.new.request_id} reads a foreign token at position {position}, group {group}, "
                            f"block {block}, in step {output.step_id}"
                        )
                        break

    def put(self, group: int, table: Sequence[int], position: int, value: int) -> None:
        """Write one token slot; the null block takes nothing."""
        size = self.specs[group].block_size
        if block := table[position // size]:
            self._blocks.setdefault((group, block), [0] * size)[position % size] = value
            self._states.pop(block, None)

    def retire(self, step_id: int) -> None:
        self._touched.pop(step_id, None)

    def _check_counts(
        self, output: SchedulerOutput, row: FakeRow, num_new: int, num_draft: int, *, samples: bool
    ) -> bool:
        """Check that the row has the tokens that it is to compute."""
        name, end, num_tokens = row.new.request_id, row.num_computed + num_new, len(row.tokens)
        if end > num_tokens:
            self._violations.append(f"{name} computes token {end - 1} of {num_tokens}")
            return False
        if samples != (end == num_tokens):
            self._violations.append(f"{name} samples={samples} at {end} of {num_tokens} tokens")
        if end + num_draft > output.max_seq_len:
            self._violations.append(f"max_seq_len {output.max_seq_len} is less than {name}'s {end + num_draft}")
        return True

    def _hold(self, row: FakeRow, group: int, num_values: int, held: dict[int, set[str]]) -> None:
        """Note which blocks the row reads or writes in this step."""
        table, size = row.tables[group], self.specs[group].block_size
        first = self._first_read(group, row.num_computed) // size
        for index in range(first, -(-(row.num_computed + num_values) // size)):
            held.setdefault(table[index] if index < len(table) else 0, set()).add(row.new.request_id)

    def _write_values(
        self,
        output: SchedulerOutput,
        row: FakeRow,
        group: int,
        values: Sequence[int],
        written: set[tuple[int, int, int]],
    ) -> None:
        table, size, name = row.tables[group], self.specs[group].block_size, row.new.request_id
        for position, value in enumerate(values, row.num_computed):
            block = table[position // size] if position // size < len(table) else 0
            if not block:
                self._violations.append(f"{name} writes position {position} of group {group} without a block")
                continue
            place = (group, block, position % size)
            if place in written:
                self._violations.append(f"step {output.step_id} writes block {block} twice")
            written.add(place)
            self._check_untouched(output, block, name)
            self.put(group, table, position, value)

    def _write_junk(self, row: FakeRow) -> None:
        """All that was not computed when the request went wrong."""
        for group in self._state_groups(row):
            self._put_state(row.tables[group][0], JUNK)
        for group in self._token_groups(row):
            table = row.tables[group]
            for position in range(row.num_computed, len(table) * self.specs[group].block_size):
                self.put(group, table, position, JUNK)

    def _state_groups(self, row: FakeRow) -> list[int]:
        return [group for group in range(len(row.tables)) if self.specs[group].has_fixed_page]

    def _token_groups(self, row: FakeRow) -> list[int]:
        return [group for group in range(len(row.tables)) if not self.specs[group].has_fixed_page]

    def _write_state(self, row: FakeRow, group: int, num_new: int, *, junk: bool) -> bool:
        """Compute tokens on the row's state, which has to be the one behind those before. False: it is junk."""
        [block], first = row.tables[group], row.num_computed
        state = self._states.get(block) if first else None
        if first and state not in (JUNK, row.hashes[first - 1]):
            self._violations.append(f"{row.new.request_id} goes on at {first} from a foreign state, block {block}")
        self._put_state(block, JUNK if junk or state == JUNK else row.hashes[first + num_new - 1])
        return state != JUNK

    def _put_state(self, block: int, value: int) -> None:
        """A state takes the whole block."""
        self._states[block] = value
        for group in range(len(self.specs)):
            self._blocks.pop((group, block), None)

    def _check_apart(self, output: SchedulerOutput, rows: Sequence[FakeRow], written: set[tuple[int, int]]) -> None:
        """Rows of one token may be written and read in one launch: no row's context holds a block that another one fills."""
        for row in rows:
            if row.is_spoilt:
                continue  # it is not read
            for group in self._token_groups(row):
                table, size = row.tables[group], self.specs[group].block_size
                own = table[row.num_computed // size] if row.num_computed // size < len(table) else 0
                for block in table[self._first_read(group, row.num_computed) // size : row.num_computed // size]:
                    if (group, block) in written and block != own:
                        self._violations.append(
                            f"step {output.step_id}, all of one-token rows, fills block {block}, which {row.new.request_id} reads"
                        )

    def _check_untouched(self, output: SchedulerOutput, block: int, name: str) -> None:
        """Without order no block may be written that an open step reads for somebody else."""
        for step_id, (_, held) in self._touched.items():
            if held.get(block, {name}) != {name}:
                self._violations.append(
                    f"step {output.step_id} writes block {block}, which open step {step_id} reads for {held[block]}"
                )

    def _first_read(self, group: int, position: int) -> int:
        """The first position that the token at `position` attends to."""
        spec = self.specs[group]
        return max(0, position - spec.sliding_window + 1) if isinstance(spec, SlidingWindowSpec) else 0
