"""Fakes for tests of schedulers and engines: an executor with a paged store, a grammar, a proposer, a connector.

The fake model's next token is a function of all tokens before it, read through the block tables out of a store that
keeps a running hash per token slot. A wrong block, slot, position or order of steps reads a wrong hash, which is noted
in `FakeExecutor.violations`. No torch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pelton.config import EngineConfig
from pelton.engine.messages import FinishReason, LogprobColumns
from pelton.errors import EngineDeadError, RequestError
from pelton.executor.interface import DeviceReport, Executor, StepHandle
from pelton.kv_cache.interface import BlockIds
from pelton.kv_cache.spec import (
    FullAttentionSpec,
    KVCacheGroup,
    KVCachePlan,
    KVCacheSpec,
    KVCacheTensor,
    SlidingWindowSpec,
)  # fmt: skip
from pelton.kv_transfer.interface import SchedulerConnector
from pelton.model.resolved import ResolvedModel
from pelton.plugins import Plugins
from pelton.request import EngineRequest
from pelton.sampling_params import StructuredOutputsParams
from pelton.scheduler.output import GrammarMasks, ModelOutput, NewRequest, SchedulerOutput
from pelton.spec_decode.interface import DraftProposer
from pelton.structured.interface import Grammar, StructuredOutputBackend

MODULUS = (1 << 61) - 1
EMPTY = 1  # hash of no tokens
SPOILT_TOKEN = 1_000_000  # sampled from junk: no output may hold it
JUNK = -1  # what a failed step leaves in the blocks it wrote


def extend_hash(value: int, token: int) -> int:
    """Running hash of a token sequence, one token longer."""
    return (value * 1_000_003 + token + 7) % MODULUS


def hash_tokens(tokens: Iterable[int]) -> int:
    value = EMPTY
    for token in tokens:
        value = extend_hash(value, token)
    return value


@dataclass(frozen=True)
class FakeModel:
    """Defines every continuation: `pick` is the greedy token after a prefix."""

    vocab_size: int = 50
    eos_token_id: int = 0
    eos_every: int = 0  # about every how many tokens EOS comes; 0 for never by itself

    def pick(self, prefix_hash: int, *, allowed: Callable[[int], bool] | None = None) -> int:
        """The token after a prefix: the first allowed one from a place that the prefix decides."""
        start = (prefix_hash >> 13) % self.vocab_size
        if self.eos_every and (prefix_hash >> 31) % self.eos_every == 0:
            start = self.eos_token_id
        elif start == self.eos_token_id:
            start = (start + 1) % self.vocab_size
        for step in range(self.vocab_size):
            token = (start + step) % self.vocab_size
            if allowed is None or allowed(token):
                return token
        raise AssertionError("no token is allowed")

    def generate(
        self, request: EngineRequest, *, max_model_len: int, grammar: Grammar | None = None
    ) -> tuple[list[int], FinishReason]:
        """What a request gets when it runs alone, by the rules and not by any scheduler's code."""
        params = request.sampling_params
        prompt = request.prompt_token_ids
        stop_ids = set(params.stop_token_ids or ())
        eos_ids = set() if params.ignore_eos else set(request.eos_token_ids)
        output: list[int] = []
        value = hash_tokens(prompt)
        while True:
            mask = None
            if grammar is not None:
                mask = bytearray(4 * ((self.vocab_size + 31) // 32))
                grammar.fill_bitmask(mask)
            masked = (stop_ids | set(request.eos_token_ids)) if len(output) < params.min_tokens else set()
            token = self.pick(value, allowed=_allowed(mask, masked))
            output.append(token)
            value = extend_hash(value, token)
            if token in eos_ids or token in stop_ids:
                return output, FinishReason.STOP
            if grammar is not None:
                assert grammar.accept([token])
                if grammar.is_terminated() and not eos_ids:
                    return output, FinishReason.STOP
            if len(output) == params.max_tokens or len(prompt) + len(output) == max_model_len:
                return output, FinishReason.LENGTH


def _allowed(mask: bytes | bytearray | None, masked: set[int]) -> Callable[[int], bool] | None:
    if mask is None and not masked:
        return None

    def is_allowed(token: int) -> bool:
        return token not in masked and (mask is None or bool(mask[token // 8] >> (token % 8) & 1))

    return is_allowed


class FakeDeviceError(Exception):
    """A step failed on the fake device."""


@dataclass
class _Slot:
    """One row of the fake's batch state."""

    new: NewRequest
    tokens: list[int]
    hashes: list[int]  # running hash through each token
    num_computed: int
    tables: list[list[int]]
    drafts: list[int] = field(default_factory=list)
    is_spoilt: bool = False  # a failed step or load left junk that it has read: what it samples must not be used

    def append(self, token: int) -> None:
        self.hashes.append(extend_hash(self.hashes[-1] if self.hashes else EMPTY, token))
        self.tokens.append(token)


class FakeStepHandle(StepHandle):
    """Not ready before `polls` looks at it, nor before its masks came."""

    def __init__(self, executor: FakeExecutor, output: SchedulerOutput, polls: int) -> None:
        self.output = output
        self.value: ModelOutput | None = None
        self.error: Exception | None = None
        self._executor = executor
        self._polls = polls

    def ready(self) -> bool:
        if self.value is None and self.error is None:
            return False
        self._polls -= 1
        return self._polls < 0

    def result(self, timeout_s: float | None = None) -> ModelOutput:
        if self._executor.dead is not None:
            raise self._executor.dead
        if self.value is None and self.error is None:
            raise AssertionError(f"step {self.output.step_id} waits for masks: its result would never come")
        if timeout_s is not None and not self.ready():
            raise TimeoutError
        self._executor.retire(self)
        if self.error is not None:
            raise self.error
        assert self.value is not None
        return self.value


def fake_resolved_model(
    *, vocab_size: int = 50, max_model_len: int = 256, eos_token_ids: Sequence[int] = (0,)
) -> ResolvedModel:
    """What `resolve_model` would give for the fake model."""
    return ResolvedModel(
        name="fake", path="fake", weights_format="dummy", hf_config={}, architecture="Fake", dtype="float32",
        max_model_len=max_model_len, vocab_size=vocab_size, eos_token_ids=list(eos_token_ids), generation_config={},
        tokenizer_path=None,
    )  # fmt: skip


class FakeExecutor(Executor):
    """Runs steps at once, hands their results out late, and checks everything it is told.

    specs: one spec per layer, by name; groups come from the plan. A test may replace the script attributes:
    polls(step_id): looks before a step is ready. fails(step_id): error of the whole step. row_error(request_id, step_id).
    """

    def __init__(
        self,
        config: EngineConfig | None = None,
        model: ResolvedModel | None = None,
        plugins: Plugins | None = None,
        *,
        fake_model: FakeModel | None = None,
        specs: dict[str, KVCacheSpec] | None = None,
        steps_are_ordered: bool = True,
        num_draft_tokens: int = 0,
        tells_drafts: bool = False,
        max_num_batched_tokens: int | None = None,
        max_num_seqs: int | None = None,
    ) -> None:
        config = config or EngineConfig()
        self.fake_model = fake_model or FakeModel(vocab_size=model.vocab_size if model else 50)
        self.steps_are_ordered = steps_are_ordered
        self.max_concurrent_steps = 8
        self.max_num_batched_tokens = max_num_batched_tokens or config.scheduler.max_num_batched_tokens
        self.max_num_seqs = max_num_seqs or config.scheduler.max_num_seqs
        self._specs = specs or {"layer.0": full_spec(config.kv_cache.block_size)}
        self._num_draft_tokens = num_draft_tokens
        self._tells_drafts = tells_drafts
        self._group_specs: list[KVCacheSpec] = []
        self._store: dict[tuple[int, int], list[int]] = {}  # (group, block) -> running hash per token slot
        self._slots: dict[int, _Slot] = {}
        self._open: deque[FakeStepHandle] = deque()
        self._touched: dict[int, tuple[set[int], dict[int, set[str]]]] = {}  # step -> (slots, block -> request ids)
        self._awaiting: tuple[FakeStepHandle, list[tuple[int, _Slot]]] | None = None
        self._receiving: list[tuple[int, Any]] = []  # (step, load)
        self._sent: list[tuple[int, str]] = []
        self.violations: list[str] = []
        self.outputs: list[SchedulerOutput] = []
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.num_computed_tokens = 0  # tokens that went through the fake model
        self.dead: Exception | None = None
        self.is_shut_down = False
        self.polls: Callable[[int], int] = lambda step_id: 0
        self.fails: Callable[[int], str | None] = lambda step_id: None
        self.row_error: Callable[[str, int], str | None] = lambda request_id, step_id: None
        self.bad_loads: Callable[[str], bool] = lambda request_id: False
        self.transfer_steps = 2  # steps that a late KV transfer takes

    # The interface.

    def kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        return dict(self._specs)

    def available_kv_cache_bytes(self) -> int:
        return 1 << 20

    def initialize_kv_cache(self, plan: KVCachePlan) -> None:
        self.initialize_groups([group.spec for group in plan.groups])

    def initialize_groups(self, specs: Sequence[KVCacheSpec]) -> None:
        """What `initialize_kv_cache` needs of a plan."""
        self._group_specs = list(specs)

    def execute(self, output: SchedulerOutput) -> StepHandle:
        if self.dead is not None:
            raise self.dead
        if self._awaiting is not None:
            self._violate(
                f"step {output.step_id} launched while step {self._awaiting[0].output.step_id} waits for masks"
            )
        self.outputs.append(output)
        handle = FakeStepHandle(self, output, self.polls(output.step_id))
        self._open.append(handle)
        self._check_columns(output)
        self._update_state(output)
        rows = [(slot, self._slots[slot]) for slot in output.slots]
        self._load(output)
        message = self.fails(output.step_id)
        self._write(output, rows, junk=message is not None)
        if message is not None:
            handle.error = FakeDeviceError(message)
            return handle
        self._read(output, rows)
        if output.grammar_rows:
            self._awaiting = (handle, rows)
        else:
            handle.value = self._sample(output, rows, {})
        return handle

    def sample(self, masks: GrammarMasks) -> None:
        assert self._awaiting is not None, "no step waits for masks"
        (handle, rows), self._awaiting = self._awaiting, None
        output = handle.output
        assert masks.step_id == output.step_id, "masks of another step"
        words = (self.fake_model.vocab_size + 31) // 32
        by_row: dict[int, list[bytes]] = {}
        offset = 0
        for row, count in zip(output.grammar_rows, masks.num_masks, strict=True):
            by_row[row] = [masks.bitmask[offset + 4 * words * i : offset + 4 * words * (i + 1)] for i in range(count)]
            offset += 4 * words * count
        assert offset == len(masks.bitmask), "bitmask has another size than num_masks says"
        handle.value = self._sample(output, rows, by_row)

    def call(self, method: str, *args: Any) -> Any:
        self.calls.append((method, args))
        return method

    def report(self) -> DeviceReport:
        return DeviceReport(
            device="fake", platform="fake", attention_backend="fake", attention_reason="a test", phase_s={"load": 0.5}
        )

    def check_health(self) -> None:
        if self.dead is not None:
            raise self.dead

    def shutdown(self) -> None:
        self.is_shut_down = True

    # For tests.

    @property
    def awaits_masks(self) -> bool:
        """True while the newest step waits for `sample`."""
        return self._awaiting is not None

    def die(self, why: str) -> None:
        """From now on every call says that the workers are gone."""
        self.dead = EngineDeadError(why)

    def retire(self, handle: FakeStepHandle) -> None:
        """A step's result was taken."""
        if handle in self._open:
            if self._open[0] is not handle:
                self._violate(f"the result of step {handle.output.step_id} was taken before an older one's")
            self._open.remove(handle)
        self._touched.pop(handle.output.step_id, None)

    def _violate(self, message: str) -> None:
        self.violations.append(message)

    # A step.

    def _check_columns(self, output: SchedulerOutput) -> None:
        """What a SchedulerOutput promises of itself."""
        step, num_rows = output.step_id, len(output.slots)
        if len(set(output.slots)) != num_rows:
            self._violate(f"step {step} has a slot twice: {output.slots}")
        if not len(output.num_scheduled) == len(output.samples) == num_rows:
            self._violate(f"step {step} has columns of different lengths")
        if sum(output.num_scheduled) != output.total_num_scheduled_tokens:
            self._violate(
                f"step {step} says {output.total_num_scheduled_tokens} tokens, has {sum(output.num_scheduled)}"
            )
        if self.max_num_batched_tokens is not None and sum(output.num_scheduled) > self.max_num_batched_tokens:
            self._violate(f"step {step} has {sum(output.num_scheduled)} tokens, over the budget")
        if self.max_num_seqs is not None and num_rows > self.max_num_seqs:
            self._violate(f"step {step} has {num_rows} rows, over max_num_seqs")
        single = [count == 1 for count in output.num_scheduled]
        if single != sorted(single, reverse=True):
            self._violate(f"step {step} does not have rows with one token first: {output.num_scheduled}")
        if any(count < 1 for count in output.num_scheduled):
            self._violate(f"step {step} has an empty row")
        if output.num_scheduled and max(output.num_scheduled) > output.max_query_len:
            self._violate(f"step {step}: max_query_len {output.max_query_len} is no upper bound")

    def _update_state(self, output: SchedulerOutput) -> None:
        in_open_steps = set[int]().union(*(slots for slots, _ in self._touched.values()))
        for slot in output.freed_slots:
            self._slots.pop(slot, None)
        for new in output.new:
            if new.slot in self._slots:
                self._violate(f"step {output.step_id} gives slot {new.slot} to two requests")
            if not self.steps_are_ordered and new.slot in in_open_steps:
                self._violate(f"step {output.step_id} gives slot {new.slot} away under an open step")
            if new.num_computed_tokens >= len(new.token_ids):
                self._violate(f"{new.request_id} starts with nothing to compute")
            state = _Slot(new, [], [], new.num_computed_tokens, [list(ids) for ids in new.block_ids])
            for token in new.token_ids:
                state.append(token)
            self._slots[new.slot] = state
        for group, slot, start, block_ids in output.block_appends:
            table = self._slots[slot].tables[group]
            if len(table) != start:
                self._violate(f"step {output.step_id} appends at {start} to a table of {len(table)} blocks")
            table += block_ids

    def _write(self, output: SchedulerOutput, rows: list[tuple[int, _Slot]], *, junk: bool) -> None:
        """All rows write their KV before any row reads."""
        written: set[tuple[int, int, int]] = set()
        held: dict[int, set[str]] = {}
        for row, (_, state) in enumerate(rows):
            if state.is_spoilt:
                self._write_junk(state)  # after a failed step its counts are not the scheduler's any more
                continue
            name = state.new.request_id
            num_draft = output.num_draft[row] if output.num_draft else 0
            first, count = state.num_computed, output.num_scheduled[row] - num_draft
            if first + count > len(state.tokens):
                self._violate(f"{name} computes token {first + count - 1} of {len(state.tokens)}")
                continue
            if output.samples[row] != (first + count == len(state.tokens)):
                self._violate(f"{name} samples={output.samples[row]} at {first + count} of {len(state.tokens)} tokens")
            if first + count + num_draft > output.max_seq_len:
                self._violate(f"max_seq_len {output.max_seq_len} is less than {name}'s {first + count + num_draft}")
            self.num_computed_tokens += count
            if num_draft:
                given = output.draft_token_ids[row] if output.draft_token_ids else state.drafts[:num_draft]
                state.drafts = [*given, *[-1] * (num_draft - len(given))]
            values = state.hashes[first : first + count]
            for token in state.drafts[:num_draft]:
                values.append(extend_hash(values[-1], token))
            for group, table in enumerate(state.tables):
                size = self._group_specs[group].block_size
                for index in range(self._first_read(group, first) // size, -(-(first + len(values)) // size)):
                    held.setdefault(table[index] if index < len(table) else 0, set()).add(name)
                for position, value in enumerate(values, first):
                    block = table[position // size] if position // size < len(table) else 0
                    if not block:
                        self._violate(f"{name} writes position {position} of group {group} without a block")
                        continue
                    place = (group, block, position % size)
                    if place in written:
                        self._violate(f"step {output.step_id} writes block {block} twice")
                    written.add(place)
                    self._check_untouched(output, block, name)
                    self._store.setdefault((group, block), [0] * size)[position % size] = JUNK if junk else value
            state.is_spoilt = junk
        if not self.steps_are_ordered:
            self._touched[output.step_id] = ({slot for slot, _ in rows}, held)

    def _write_junk(self, state: _Slot) -> None:
        """All that was not computed when the request went wrong."""
        for group, table in enumerate(state.tables):
            size = self._group_specs[group].block_size
            for position in range(state.num_computed, len(table) * size):
                if table[position // size]:
                    self._store.setdefault((group, table[position // size]), [0] * size)[position % size] = JUNK

    def _check_untouched(self, output: SchedulerOutput, block: int, name: str) -> None:
        """Without order no block may be written that an open step reads for somebody else."""
        for step_id, (_, held) in self._touched.items():
            if held.get(block, {name}) != {name}:
                self._violate(
                    f"step {output.step_id} writes block {block}, which open step {step_id} reads for {held[block]}"
                )

    def _read(self, output: SchedulerOutput, rows: list[tuple[int, _Slot]]) -> None:
        """What each row attends to has to be its own tokens."""
        for row, (_, state) in enumerate(rows):
            if state.is_spoilt:
                continue
            num_draft = output.num_draft[row] if output.num_draft else 0
            first, last = state.num_computed, state.num_computed + output.num_scheduled[row] - num_draft
            for group, table in enumerate(state.tables):
                spec = self._group_specs[group]
                for position in range(self._first_read(group, first), min(last, len(state.tokens))):
                    index = position // spec.block_size
                    block = table[index] if index < len(table) else 0
                    found = self._store.get((group, block), [0] * spec.block_size)[position % spec.block_size]
                    if found == JUNK:
                        state.is_spoilt = True
                        break
                    if found != state.hashes[position]:
                        self._violate(
                            f"{state.new.request_id} reads a foreign token at position {position}, group {group}, "
                            f"block {block}, in step {output.step_id}"
                        )
                        break

    def _first_read(self, group: int, position: int) -> int:
        """The first position that the token at `position` attends to."""
        spec = self._group_specs[group]
        return max(0, position - spec.sliding_window + 1) if isinstance(spec, SlidingWindowSpec) else 0

    def _sample(
        self, output: SchedulerOutput, rows: list[tuple[int, _Slot]], masks: dict[int, list[bytes]]
    ) -> ModelOutput:
        result = ModelOutput(step_id=output.step_id, token_ids=[[] for _ in rows], device_time_s=1e-6)
        if self._tells_drafts:
            result.draft_token_ids = [[] for _ in rows]
        for row, (_, state) in enumerate(rows):
            new = state.new
            num_draft = output.num_draft[row] if output.num_draft else 0
            num_new = output.num_scheduled[row] - num_draft
            params = new.sampling_params
            if params.prompt_logprobs is not None and state.num_computed < new.num_prompt_tokens - 1:
                last = min(state.num_computed + num_new, new.num_prompt_tokens - 1)
                chosen = new.token_ids[state.num_computed + 1 : last + 1]
                result.prompt_logprobs[row] = _columns(chosen)
            message = self.row_error(new.request_id, output.step_id)
            if message is not None:
                result.row_errors.append((row, message))
            state.num_computed += num_new
            if not output.samples[row]:
                continue
            if state.is_spoilt:
                state.num_computed -= num_new
                result.token_ids[row] = [SPOILT_TOKEN]
                continue
            sampled = self._sample_row(state, num_draft, masks.get(row))
            state.num_computed += len(sampled) - 1
            result.token_ids[row] = sampled
            if params.logprobs is not None:
                result.logprobs[row] = _columns(sampled)
            if self._num_draft_tokens:
                state.drafts = self._draft(state)
                if self._tells_drafts:
                    result.draft_token_ids[row] = list(state.drafts)
        self._finish_transfers(output, result)
        return result

    def _sample_row(self, state: _Slot, num_draft: int, masks: list[bytes] | None) -> list[int]:
        """Accept drafts as long as they are the model's own choice, and sample one more."""
        params, new = state.new.sampling_params, state.new
        drafts = state.drafts[:num_draft]
        sampled: list[int] = []
        for index in range(num_draft + 1):
            num_output = len(state.tokens) - new.num_prompt_tokens
            masked = {*new.eos_token_ids, *(params.stop_token_ids or ())} if num_output < params.min_tokens else set()
            mask = masks[index] if masks is not None else None
            token = self.fake_model.pick(state.hashes[-1], allowed=_allowed(mask, masked))
            sampled.append(token)
            state.append(token)
            if index < num_draft and drafts[index] != token:
                break
        return sampled

    def _draft(self, state: _Slot) -> list[int]:
        """The device's own proposer: some right tokens, then wrong ones, by the prefix."""
        value, drafts = state.hashes[-1], []
        num_right = (value >> 7) % (self._num_draft_tokens + 1)
        for index in range(self._num_draft_tokens):
            token = self.fake_model.pick(value)
            if index >= num_right:
                token = (token + 1) % self.fake_model.vocab_size
            drafts.append(token)
            value = extend_hash(value, token)
        return drafts

    # The worker's half of `FakeConnector`.

    def _load(self, output: SchedulerOutput) -> None:
        if FakeConnector.name not in output.extensions:
            return
        metadata = msgspec.msgpack.decode(output.extensions[FakeConnector.name])
        for load in metadata["loads"]:
            if load["later"]:
                self._receiving.append((output.step_id + self.transfer_steps, load))
            else:
                self._bring(load)
        self._sent += [(output.step_id + self.transfer_steps, request_id) for request_id in metadata["sends"]]

    def _bring(self, load: Any) -> None:
        values = []
        value = EMPTY
        for token in load["token_ids"]:
            value = extend_hash(value, token)
            values.append(value)
        is_bad = self.bad_loads(load["request_id"])
        for group, table in enumerate(load["block_ids"]):
            size = self._group_specs[group].block_size
            for position in range(load["first"], load["first"] + load["count"]):
                block = table[position // size]
                if block:
                    place = self._store.setdefault((group, block), [0] * size)
                    place[position % size] = JUNK if is_bad else values[position]

    def _finish_transfers(self, output: SchedulerOutput, result: ModelOutput) -> None:
        """Report what has arrived and gone by this step."""
        now = output.step_id
        arrived = [load for due, load in self._receiving if due <= now]
        self._receiving = [(due, load) for due, load in self._receiving if due > now]
        for load in arrived:
            self._bring(load)
            result.finished_receiving.append(load["request_id"])
        loads: list[Any] = list(arrived)
        if FakeConnector.name in output.extensions:
            metadata = msgspec.msgpack.decode(output.extensions[FakeConnector.name])
            loads += [load for load in metadata["loads"] if not load["later"]]
        for load in loads:
            if self.bad_loads(load["request_id"]):
                for group, table in enumerate(load["block_ids"]):
                    size = self._group_specs[group].block_size
                    last = -(-(load["first"] + load["count"]) // size)
                    result.invalid_block_ids += [block for block in table[load["first"] // size : last] if block]
        result.finished_sending = [request_id for due, request_id in self._sent if due <= now]
        self._sent = [(due, request_id) for due, request_id in self._sent if due > now]


def _columns(tokens: Sequence[int]) -> LogprobColumns:
    return LogprobColumns([[token] for token in tokens], [[-0.5] for _ in tokens], [1 for _ in tokens])


def full_spec(block_size: int) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_dim=1, dtype="float32")


def window_spec(block_size: int, window: int) -> SlidingWindowSpec:
    return SlidingWindowSpec(block_size=block_size, num_kv_heads=1, head_dim=1, dtype="float32", sliding_window=window)


class FakeGrammar(Grammar):
    """Position p of the output must be a token with t % 3 != p % 3; after `length` tokens only EOS may follow."""

    def __init__(self, length: int, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self.length = length
        self.vocab_size = vocab_size
        self.eos_token_ids = tuple(eos_token_ids)
        self.position = 0

    def _allows(self, position: int, token: int) -> bool:
        if position >= self.length:
            return token in self.eos_token_ids
        return token not in self.eos_token_ids and token % 3 != position % 3

    def accept(self, token_ids: Sequence[int]) -> bool:
        if self.validate(token_ids) != len(token_ids):
            return False
        self.position += len(token_ids)
        return True

    def validate(self, token_ids: Sequence[int]) -> int:
        for index, token in enumerate(token_ids):
            if not self._allows(self.position + index, token):
                return index
        return len(token_ids)

    def fill_bitmask(self, row: bytearray | memoryview, draft_token_ids: Sequence[int] = ()) -> None:
        position = self.position + len(draft_token_ids)
        row[:] = bytes(len(row))
        for token in range(self.vocab_size):
            if self._allows(position, token):
                row[token // 8] |= 1 << (token % 8)

    def is_terminated(self) -> bool:
        return self.position >= self.length


class FakeGrammarBackend(StructuredOutputBackend):
    """`regex` is the number of tokens; what is no number is refused."""

    def __init__(self, tokenizer_path: str = "", vocab_size: int = 50, eos_token_ids: Sequence[int] = (0,)) -> None:
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids

    def compile(self, params: StructuredOutputsParams) -> Grammar:
        assert params.regex is not None
        if not params.regex.isdigit():
            raise RequestError("regex is not a number", param="structured_outputs", value=params.regex)
        return FakeGrammar(int(params.regex), self.vocab_size, self.eos_token_ids)


class FakeGrammarSource:
    """Compiles when the test says so: `release()`, or at once with `is_held` False."""

    def __init__(self, backend: StructuredOutputBackend | None = None, *, is_held: bool = False) -> None:
        self.backend = backend or FakeGrammarBackend()
        self.is_held = is_held
        self._held: list[tuple[Future[Grammar], StructuredOutputsParams]] = []

    def submit(self, params: StructuredOutputsParams) -> Future[Grammar]:
        future: Future[Grammar] = Future()
        self._held.append((future, params))
        if not self.is_held:
            self.release()
        return future

    def release(self) -> None:
        for future, params in self._held:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(self.backend.compile(params))
                except Exception as error:
                    future.set_exception(error)
        self._held.clear()

    def take_compile_times(self) -> list[float]:
        return []


class FakeProposer(DraftProposer):
    """Proposes the fake model's own tokens, of which those from a place that the prefix decides are wrong."""

    def __init__(self, fake_model: FakeModel, max_draft_tokens: int = 3) -> None:
        self.max_draft_tokens = max_draft_tokens
        self.fake_model = fake_model

    def propose(self, request_id: str, token_ids: Sequence[int]) -> list[int]:
        value = hash_tokens(token_ids)
        num_drafts = (value >> 5) % (self.max_draft_tokens + 1)
        num_right = (value >> 9) % (self.max_draft_tokens + 1)
        drafts = []
        for index in range(num_drafts):
            token = (self.fake_model.pick(value) + (index >= num_right)) % self.fake_model.vocab_size
            drafts.append(token)
            value = extend_hash(value, token)
        return drafts


class FakeConnector(SchedulerConnector):
    """Knows the KV of some prompts' heads: `num_remote(request)` tokens, None for "ask again"."""

    name = "fake"

    def __init__(
        self,
        num_remote: Callable[[EngineRequest], int | None] = lambda request: 0,
        *,
        is_later: Callable[[EngineRequest], bool] = lambda request: False,
        sends: Callable[[str], bool] = lambda request_id: False,
    ) -> None:
        self.num_remote = num_remote
        self.is_later = is_later
        self.sends = sends
        self.asked: list[tuple[str, int]] = []
        self.finished: list[str] = []
        self._first: dict[str, int] = {}
        self._loads: list[dict[str, Any]] = []
        self._sends: list[str] = []

    def num_matched_tokens(self, request: EngineRequest, num_computed_tokens: int) -> tuple[int | None, bool]:
        self.asked.append((request.request_id, num_computed_tokens))
        self._first[request.request_id] = num_computed_tokens
        known = self.num_remote(request)
        if known is None:
            return None, False
        known = min(known, len(request.prompt_token_ids))
        return max(known - num_computed_tokens, 0), self.is_later(request)

    def after_allocation(self, request: EngineRequest, block_ids: BlockIds, num_external_tokens: int) -> None:
        self._loads.append(
            {
                "request_id": request.request_id,
                "token_ids": request.prompt_token_ids,
                "block_ids": [list(ids) for ids in block_ids],
                "first": self._first[request.request_id],
                "count": num_external_tokens,
                "later": self.is_later(request),
            }
        )

    def build_metadata(self, output: SchedulerOutput) -> bytes:
        metadata = msgspec.msgpack.encode({"loads": self._loads, "sends": self._sends})
        self._loads, self._sends = [], []
        return metadata

    def request_finished(self, request_id: str, block_ids: BlockIds) -> bool:
        self.finished.append(request_id)
        if any(block_ids) and self.sends(request_id):
            self._sends.append(request_id)
            return True
        return False


def simple_plan(specs: Sequence[KVCacheSpec], num_blocks: int) -> KVCachePlan:
    """A plan with one layer a group, for tests that need no planner."""
    groups = tuple(KVCacheGroup((f"layer.{index}",), spec) for index, spec in enumerate(specs))
    size = max(spec.page_size_bytes for spec in specs)
    tensor = KVCacheTensor(num_blocks * size, tuple(name for group in groups for name in group.layer_names))
    return KVCachePlan(num_blocks, (tensor,), groups)


__all__ = [
    "FakeConnector", "FakeDeviceError", "FakeExecutor", "FakeGrammar", "FakeGrammarBackend", "FakeGrammarSource",
    "FakeModel", "FakeProposer", "FakeStepHandle", "fake_resolved_model", "full_spec", "simple_plan",
    "window_spec",
]  # fmt: skip
