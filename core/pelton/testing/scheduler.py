"""Conformance suite for schedulers, and the harness that drives one against the fake executor.

A plugin author subclasses `SchedulerConformance`, gives `make_scheduler`, and runs it with pytest:

    class TestMine(SchedulerConformance):
        def make_scheduler(self, context):
            return MyScheduler(context)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from pelton.config import KVCacheConfig, SchedulerConfig
from pelton.errors import EngineError, RequestError
from pelton.executor.interface import StepHandle
from pelton.kv_cache.hashing import BlockHasher
from pelton.kv_cache.interface import KVManagerContext
from pelton.kv_cache.spec import KVCacheSpec
from pelton.messages.outputs import EngineOutput, EventType, FinishReason
from pelton.messages.request import AdapterRef, EngineRequest
from pelton.messages.step import SchedulerOutput
from pelton.sampling_params import SamplingParams
from pelton.scheduler.interface import Scheduler, SchedulerContext
from pelton.testing.fake_executor import FakeExecutor
from pelton.testing.fake_model import FakeModel
from pelton.testing.kv_specs import full_spec, make_plan
from pelton.testing.plugins import built_in

SchedulerFactory = Callable[[SchedulerContext], Scheduler]


def make_request(
    request_id: str,
    prompt: Sequence[int] | int,
    max_tokens: int | None = 4,
    *,
    eos_token_ids: Sequence[int] = (),
    priority: int = 0,
    timeout_s: float | None = None,
    cache_salt: str | None = None,
    adapter_id: int = 0,
    **params: Any,
) -> EngineRequest:
    """A request for tests; `prompt` as a number means that many tokens of its own."""
    if isinstance(prompt, int):
        seed = sum(request_id.encode())
        prompt = [1 + (seed * 31 + index * 7 + index // 5) % 40 for index in range(prompt)]
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=list(prompt),
        sampling_params=SamplingParams(temperature=0.0, max_tokens=max_tokens, **params),
        eos_token_ids=list(eos_token_ids),
        priority=priority,
        timeout_s=timeout_s,
        cache_salt=cache_salt,
        adapter=AdapterRef(id=adapter_id, name=f"adapter-{adapter_id}") if adapter_id else None,
    )


class FakeClock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Harness:
    """A scheduler, a real KV manager and the fake executor, stepped by hand or to the end.

    `launch` schedules and executes one step, `retire` takes the oldest one in; `run` alternates as the engine core does.
    """

    def __init__(
        self,
        factory: SchedulerFactory | None = None,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        specs: Sequence[KVCacheSpec] | None = None,
        max_model_len: int = 128,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 64,
        max_steps_in_flight: int = 1,
        steps_are_ordered: bool = True,
        prefix_caching: bool = True,
        fake_model: FakeModel | None = None,
        num_draft_tokens: int = 0,
        tells_drafts: bool = False,
        config: SchedulerConfig | None = None,
        **arguments: Any,
    ) -> None:
        self.fake_model = fake_model or FakeModel()
        self.max_model_len = max_model_len
        self.max_steps_in_flight = max_steps_in_flight
        plan = make_plan(specs or [full_spec(block_size)], num_blocks)
        self.kv = built_in("pelton_kv_cache_managers")(
            KVManagerContext(
                plan=plan,
                config=KVCacheConfig(enable_prefix_caching=prefix_caching),
                max_model_len=max_model_len,
                max_num_batched_tokens=max_num_batched_tokens,
            )
        )
        self.executor = FakeExecutor(
            fake_model=self.fake_model,
            steps_are_ordered=steps_are_ordered,
            num_draft_tokens=num_draft_tokens or (3 if tells_drafts else 0),
            tells_drafts=tells_drafts,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
        )
        self.executor.initialize_kv_cache(plan)
        self.clock = FakeClock()
        self.scheduler = (factory or built_in("pelton_schedulers"))(
            SchedulerContext(
                config=config or SchedulerConfig(),
                kv_manager=self.kv,
                max_model_len=max_model_len,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                block_sizes=[group.spec.block_size for group in plan.groups],
                vocab_size=self.fake_model.vocab_size,
                hasher=BlockHasher("sha256", plan.hash_block_size) if prefix_caching else None,
                steps_are_ordered=steps_are_ordered,
                max_steps_in_flight=max_steps_in_flight,
                num_draft_tokens=num_draft_tokens,
                clock=self.clock,
                **arguments,
            )
        )
        self.open: deque[tuple[SchedulerOutput, StepHandle]] = deque()
        self.requests: dict[str, EngineRequest] = {}
        self.outputs: dict[str, list[EngineOutput]] = {}

    def add(self, request: EngineRequest) -> EngineRequest:
        self.scheduler.add_request(request)
        self.requests[request.request_id] = request
        self.outputs[request.request_id] = []
        return request

    def launch(self) -> SchedulerOutput | None:
        """Schedule and execute one step. Masks follow as soon as no older step is open; where the next step may be launched past it,
        when something waits for it."""
        output = self.scheduler.schedule()
        if output is not None:
            self.open.append((output, self.executor.execute(output)))
            if not self._goes_past():
                self._bring_masks()
        return output

    def retire(self) -> list[EngineOutput]:
        """Take the oldest open step's result in."""
        self._bring_masks()
        output, handle = self.open.popleft()
        try:
            result = handle.result()
        except Exception as error:
            outputs = self.scheduler.update_failed(output, EngineError(str(error)).to_info())
        else:
            outputs = self.scheduler.update(output, result)
        if not self._goes_past():
            self._bring_masks()
        return self._note(outputs)

    def step(self) -> list[EngineOutput]:
        """As the engine core does: launch what can be, take the oldest."""
        while self.may_launch:
            if self.launch() is None:
                break
        outputs = self.retire() if self.open else []
        return outputs + self.take_outputs()

    def run(self, max_steps: int = 10_000) -> None:
        """Step until every request has ended, and every step is in."""
        for _ in range(max_steps):
            if not self.scheduler.has_unfinished_requests() and not self.open:
                break
            self.step()
            self.clock.now += 0.001
        assert not self.scheduler.has_unfinished_requests(), f"requests did not end in {max_steps} steps"
        self.take_outputs()

    def take_outputs(self) -> list[EngineOutput]:
        return self._note(self.scheduler.take_outputs())

    def _note(self, outputs: list[EngineOutput]) -> list[EngineOutput]:
        for output in outputs:
            self.outputs[output.request_id].append(output)
        return outputs

    @property
    def may_launch(self) -> bool:
        """True while another step may be open, and the newest one has its masks or may be launched past."""
        awaits_masks = bool(self.open) and self.executor.awaits_masks
        return len(self.open) < self.max_steps_in_flight and (not awaits_masks or self._goes_past())

    def _goes_past(self) -> bool:
        return self.executor.launches_past_masks and not (self.open and self.open[-1][0].num_draft)

    def _bring_masks(self) -> None:
        if self.open and self.executor.awaited is self.open[0][0]:
            masks = self.scheduler.grammar_masks(self.open[0][0])
            assert masks is not None, "a step with grammar rows has masks"
            self.executor.sample(masks)

    def tokens(self, request_id: str) -> list[int]:
        """All tokens that the request was given."""
        return [token for output in self.outputs[request_id] for token in output.new_token_ids]

    def reason(self, request_id: str) -> FinishReason | None:
        """How it ended; None while it runs. Nothing may follow an end."""
        reasons = [output.finish_reason for output in self.outputs[request_id]]
        assert all(reason is None for reason in reasons[:-1]), f"{request_id} got outputs after its end"
        return reasons[-1] if reasons else None

    def events(self, request_id: str) -> list[EventType]:
        return [event.type for output in self.outputs[request_id] for event in output.events]

    def expected(self, request_id: str) -> tuple[list[int], FinishReason]:
        return self.fake_model.generate(self.requests[request_id], max_model_len=self.max_model_len)

    def check_request(self, request_id: str) -> None:
        """It got what the model defines for it alone."""
        tokens, reason = self.expected(request_id)
        assert self.tokens(request_id) == tokens, f"{request_id}: {self.tokens(request_id)}, alone {tokens}"
        assert self.reason(request_id) is reason, f"{request_id} ended with {self.reason(request_id)}, alone {reason}"

    def check_sound(self) -> None:
        """Nothing that the executor saw was wrong."""
        assert not self.executor.violations, "\n".join(self.executor.violations[:5])

    def check_empty(self) -> None:
        """Nothing is held: blocks, slots, steps."""
        self.check_sound()
        assert not self.scheduler.has_unfinished_requests()
        assert self.kv.num_free_blocks == self.kv.num_usable_blocks, "blocks are still held"
        assert self.scheduler.schedule() is None
        stats = self.scheduler.take_stats()
        assert (stats.num_running_reqs, stats.num_waiting_reqs, stats.kv_cache_usage) == (0, 0, 0.0)

    def run_and_check(self) -> None:
        """Run to the end; every request got its own tokens, and nothing is left."""
        self.run()
        for request_id in self.requests:
            self.check_request(request_id)
        self.check_empty()


class SchedulerConformance:
    """Conformance suite of schedulers. Subclass, give `make_scheduler`, run with pytest."""

    overlaps = (1, 2, 3)

    def make_scheduler(self, context: SchedulerContext) -> Scheduler:
        raise NotImplementedError

    def harness(self, **arguments: Any) -> Harness:
        return Harness(self.make_scheduler, **arguments)

    def test_one_request_gets_its_tokens(self) -> None:
        for overlap in self.overlaps:
            harness = self.harness(max_steps_in_flight=overlap)
            harness.add(make_request("a", 5, 6))
            harness.run_and_check()

    def test_many_requests_get_their_own_tokens(self) -> None:
        for overlap in self.overlaps:
            harness = self.harness(max_steps_in_flight=overlap, num_blocks=200)
            for index in range(20):
                harness.add(make_request(f"r{index}", 1 + index * 3, 1 + index % 7))
            harness.run_and_check()

    def test_a_small_pool_delays_requests_and_loses_none(self) -> None:
        for overlap in self.overlaps:
            harness = self.harness(max_steps_in_flight=overlap, num_blocks=9)
            for index in range(6):
                harness.add(make_request(f"r{index}", 4 + index, 12))
            harness.run_and_check()

    def test_stops_at_eos(self) -> None:
        for overlap in self.overlaps:
            harness = self.harness(max_steps_in_flight=overlap, fake_model=FakeModel(eos_every=5))
            for index in range(6):
                harness.add(make_request(f"r{index}", 3 + index, 60, eos_token_ids=[0]))
            harness.run_and_check()
            assert any(harness.reason(request_id) is FinishReason.STOP for request_id in harness.requests)

    def test_abort_gives_an_output_and_frees_everything(self) -> None:
        for overlap in self.overlaps:
            harness = self.harness(max_steps_in_flight=overlap)
            harness.add(make_request("a", 9, 50))
            harness.add(make_request("b", 5, 5))
            harness.step()
            harness.scheduler.finish_requests(["a", "never-there"], FinishReason.ABORT)
            harness.run()
            assert harness.reason("a") is FinishReason.ABORT
            harness.check_request("b")
            harness.check_empty()

    def test_a_failed_step_ends_its_requests_only(self) -> None:
        for overlap in self.overlaps:
            harness = self.harness(max_steps_in_flight=overlap, max_num_seqs=2)
            harness.add(make_request("a", 5, 8))
            harness.add(make_request("b", 5, 8))
            harness.add(make_request("c", 5, 8))
            harness.executor.fails = lambda step_id: "boom" if step_id == 2 else None
            harness.run()
            assert [harness.reason(name) for name in "ab"] == [FinishReason.ERROR] * 2
            harness.check_request("c")
            harness.check_empty()

    def test_refuses_what_can_never_run(self) -> None:
        harness = self.harness(num_blocks=5)
        prompts: list[list[int] | int] = [[], 17, 500]
        for prompt in prompts:
            try:
                harness.scheduler.add_request(make_request("a", prompt))
            except RequestError:
                continue
            raise AssertionError(f"a prompt of {prompt} was taken")
        harness.check_empty()


__all__ = ["FakeClock", "Harness", "SchedulerConformance", "SchedulerFactory", "make_request"]
