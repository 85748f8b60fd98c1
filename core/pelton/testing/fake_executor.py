"""A fake executor for tests of schedulers and engines: the fake model over a paged store. No torch.

What it was told wrong is noted in `FakeExecutor.violations`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from pelton.config import EngineConfig
from pelton.errors import EngineDeadError
from pelton.executor.interface import Executor, StepHandle
from pelton.kv_cache.spec import KVCachePlan, KVCacheSpec
from pelton.messages.outputs import LogprobColumns
from pelton.messages.report import DeviceReport
from pelton.messages.step import GrammarMasks, ModelOutput, SchedulerOutput
from pelton.model.resolved import ResolvedModel
from pelton.plugins import Plugins
from pelton.testing.fake_connector import FakeTransfers
from pelton.testing.fake_model import FakeModel
from pelton.testing.fake_store import FakeRow, FakeStore, num_new_and_draft
from pelton.testing.kv_specs import full_spec

SPOILT_TOKEN = 1_000_000  # sampled from junk: no output may hold it


class FakeDeviceError(Exception):
    """A step failed on the fake device."""


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


class FakeExecutor(Executor):
    """Runs steps at once, hands their results out late, and checks everything it is told.

    specs: one spec per layer, by name; groups come from the plan. A test may replace the script attributes:
    With `launches_past_masks` a step that is launched while another waits for its masks runs when they came.
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
        self._open: deque[FakeStepHandle] = deque()
        self._awaiting: tuple[FakeStepHandle, list[FakeRow]] | None = None
        self._queued: deque[FakeStepHandle] = deque()  # launched while a step waits for its masks
        self.violations: list[str] = []
        self.store = FakeStore(self.violations, steps_are_ordered=steps_are_ordered)
        self.transfers = FakeTransfers(self.store)
        self.outputs: list[SchedulerOutput] = []
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.dead: Exception | None = None
        self.is_shut_down = False
        self.polls: Callable[[int], int] = lambda step_id: 0
        self.fails: Callable[[int], str | None] = lambda step_id: None
        self.row_error: Callable[[str, int], str | None] = lambda request_id, step_id: None

    # The interface.

    def kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        return dict(self._specs)

    def available_kv_cache_bytes(self) -> int:
        return 1 << 23

    def initialize_kv_cache(self, plan: KVCachePlan) -> None:
        self.store.specs = [group.spec for group in plan.groups]

    def execute(self, output: SchedulerOutput) -> StepHandle:
        if self.dead is not None:
            raise self.dead
        if self._awaiting is not None and self.launches_past_masks:
            handle = FakeStepHandle(self, output, self.polls(output.step_id))
            self._open.append(handle)
            self._queued.append(handle)
            return handle
        if self._awaiting is not None:
            self.violations.append(
                f"step {output.step_id} launched while step {self._awaiting[0].output.step_id} waits for masks"
            )
        handle = FakeStepHandle(self, output, self.polls(output.step_id))
        self._open.append(handle)
        return self._run(handle)

    def _run(self, handle: FakeStepHandle) -> FakeStepHandle:
        output = handle.output
        self.outputs.append(output)
        self._check_columns(output)
        rows = self.store.update(output)
        self.transfers.begin(output)
        message = self.fails(output.step_id)
        self.store.write(output, rows, junk=message is not None)
        if message is not None:
            handle.error = FakeDeviceError(message)
            return handle
        self.store.read(output, rows)
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
        if masks.error:
            self._sample(output, rows, {})  # a step that was launched behind it reads what it left
            handle.error = FakeDeviceError(masks.error)
            self.retire(handle)
            self._run_queued()
            return
        size = 4 * ((self.fake_model.vocab_size + 31) // 32)
        by_row: dict[int, list[bytes]] = {}
        offset = 0
        for row, count in zip(output.grammar_rows, masks.num_masks, strict=True):
            by_row[row] = [masks.bitmask[offset + size * i : offset + size * (i + 1)] for i in range(count)]
            offset += size * count
        assert offset == len(masks.bitmask), "bitmask has another size than num_masks says"
        handle.value = self._sample(output, rows, by_row)
        self._run_queued()

    def _run_queued(self) -> None:
        """Steps that were launched past the masks, up to the next that waits."""
        while self._queued and self._awaiting is None:
            self._run(self._queued.popleft())

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
        """True while a step waits for `sample`."""
        return self._awaiting is not None

    @property
    def awaited(self) -> SchedulerOutput | None:
        """The step that waits for `sample`."""
        return None if self._awaiting is None else self._awaiting[0].output

    @property
    def num_computed_tokens(self) -> int:
        """Tokens that went through the fake model."""
        return self.store.num_computed_tokens

    def die(self, why: str) -> None:
        """From now on every call says that the workers are gone."""
        self.dead = EngineDeadError(why)

    def retire(self, handle: FakeStepHandle) -> None:
        """A step's result was taken."""
        if handle in self._open:
            if self._open[0] is not handle:
                self.violations.append(f"the result of step {handle.output.step_id} was taken before an older one's")
            self._open.remove(handle)
        self.store.retire(handle.output.step_id)

    # A step.

    def _check_columns(self, output: SchedulerOutput) -> None:
        """Check that the columns of a SchedulerOutput agree."""
        step, num_rows, counts = output.step_id, len(output.slots), output.num_scheduled
        total, single = sum(counts), [count == 1 for count in counts]
        faults = {
            f"has a slot twice: {output.slots}": len(set(output.slots)) != num_rows,
            "has columns of different lengths": not len(counts) == len(output.samples) == num_rows,
            f"says {output.total_num_scheduled_tokens} tokens, has {total}": total != output.total_num_scheduled_tokens,
            f"has {total} tokens, over the budget": total > (self.max_num_batched_tokens or total),
            f"has {num_rows} rows, over max_num_seqs": num_rows > (self.max_num_seqs or num_rows),
            f"does not have rows with one token first: {counts}": single != sorted(single, reverse=True),
            "has an empty row": any(count < 1 for count in counts),
            f"has a max_query_len of {output.max_query_len}, no upper bound": max(counts, default=0)
            > output.max_query_len,
        }
        self.violations += [f"step {step} {fault}" for fault, is_found in faults.items() if is_found]

    def _sample(self, output: SchedulerOutput, rows: Sequence[FakeRow], masks: dict[int, list[bytes]]) -> ModelOutput:
        result = ModelOutput(step_id=output.step_id, token_ids=[[] for _ in rows])
        if self._tells_drafts:
            result.draft_token_ids = [[] for _ in rows]
        for place, row in enumerate(rows):
            new, (num_new, num_draft) = row.new, num_new_and_draft(output, place)
            if new.sampling_params.prompt_logprobs is not None and row.num_computed < new.num_prompt_tokens - 1:
                last = min(row.num_computed + num_new, new.num_prompt_tokens - 1)
                result.prompt_logprobs[place] = _columns(new.token_ids[row.num_computed + 1 : last + 1])
            message = self.row_error(new.request_id, output.step_id)
            if message is not None:
                result.row_errors.append((place, message))
            if output.samples[place] and row.is_spoilt:
                result.token_ids[place] = [SPOILT_TOKEN]
                continue
            row.num_computed += num_new
            if not output.samples[place]:
                continue
            sampled = self._sample_row(row, num_draft, masks.get(place))
            row.num_computed += len(sampled) - 1
            result.token_ids[place] = sampled
            if new.sampling_params.logprobs is not None:
                result.logprobs[place] = _columns(sampled)
            if self._num_draft_tokens:
                row.drafts = self._draft(row.hashes[-1])
                if self._tells_drafts:
                    result.draft_token_ids[place] = list(row.drafts)
        self.transfers.finish(result)
        return result

    def _sample_row(self, row: FakeRow, num_draft: int, masks: list[bytes] | None) -> list[int]:
        """Accept drafts as long as they are the model's own choice, and sample one more."""
        params, new = row.new.sampling_params, row.new
        drafts = row.drafts[:num_draft]
        sampled: list[int] = []
        for index in range(num_draft + 1):
            num_output = len(row.tokens) - new.num_prompt_tokens
            banned = {*new.eos_token_ids, *(params.stop_token_ids or ())} if num_output < params.min_tokens else set()
            bitmask = masks[index] if masks is not None else None
            token = self.fake_model.pick(row.hashes[-1], bitmask=bitmask, banned=banned)
            sampled.append(token)
            row.append(token)
            if index < num_draft and drafts[index] != token:
                break
        return sampled

    def _draft(self, prefix_hash: int) -> list[int]:
        """The device's own proposer, right for a while that the prefix decides."""
        num_right = (prefix_hash >> 7) % (self._num_draft_tokens + 1)
        return self.fake_model.draft(prefix_hash, self._num_draft_tokens, num_right)


def _columns(tokens: Sequence[int]) -> LogprobColumns:
    return LogprobColumns([[token] for token in tokens], [[-0.5] for _ in tokens], [1 for _ in tokens])
