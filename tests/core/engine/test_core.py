"""The engine core's loop over the fake executor: late steps, failures, masks, deadlines, stats, death."""

from __future__ import annotations

import itertools
import time

import msgspec
import pytest

from pelton.config import EngineConfig
from pelton.engine import core as core_module
from pelton.engine.core import EngineCore
from pelton.errors import ConfigError, EngineDeadError, RequestError
from pelton.messages.outputs import FinishReason
from pelton.messages.report import StepFit
from pelton.metrics.plugin_metrics import PluginMetrics
from pelton.metrics.stats import HOST_STAGES
from pelton.model.pooling import PoolingSpec
from pelton.plugins import load_plugins
from pelton.sampling_params import StructuredOutputsParams
from pelton.testing.fake_executor import FakeExecutor
from pelton.testing.fake_grammar import FakeGrammar, FakeGrammarBackend
from pelton.testing.fake_model import FakeModel, fake_resolved_model
from pelton.testing.kv_specs import full_spec, window_spec
from pelton.testing.scheduler import make_request


@pytest.fixture(scope="module")
def plugins():
    return load_plugins(only=[])


@pytest.fixture
def make_core(plugins):
    made = []

    def make(fake_model=None, *, max_model_len=128, with_grammars=False, monkeypatch=None, **settings):
        settings = {
            "max_num_seqs": 4, "max_num_batched_tokens": 32, "num_gpu_blocks_override": 100, "block_size": 4, **settings,
        }  # fmt: skip
        config = EngineConfig.from_flat(**settings)
        model = fake_resolved_model(max_model_len=max_model_len)
        executor = FakeExecutor(config, model, fake_model=fake_model)
        core = EngineCore(config, model, plugins, executor=executor)
        made.append(core)
        return core, executor

    yield make
    for core in made:
        core.shutdown()


def run(core, *, limit=5000):
    """Step until there is no more work; all outputs by request."""
    outputs = {}
    for _ in range(limit):
        if not core.has_work():
            return outputs
        for output in core.step().outputs:
            outputs.setdefault(output.request_id, []).append(output)
    raise AssertionError("the engine does not come to rest")


def tokens(outputs):
    return [token for output in outputs for token in output.new_token_ids]


@pytest.mark.parametrize("settings", [{"async_scheduling": False}, {}, {"max_steps_in_flight": 3}])
def test_requests_get_their_tokens_with_overlap_on_and_off(make_core, settings):
    core, executor = make_core(**settings)
    requests = [make_request(f"r{index}", 3 + 5 * index, 4 + index) for index in range(8)]
    for request in requests:
        core.add_request(request)
    outputs = run(core)
    for request in requests:
        expected, reason = executor.fake_model.generate(request, max_model_len=128)
        assert tokens(outputs[request.request_id]) == expected
        assert outputs[request.request_id][-1].finish_reason is reason
    assert not executor.violations
    assert core.call("kv_cache_usage") == 0.0


@pytest.mark.parametrize(
    "settings, budget, is_asked",
    [
        pytest.param({"max_num_batched_tokens": None}, 16, True, id="open"),
        pytest.param({"max_num_batched_tokens": 32}, 32, False, id="set"),
        pytest.param(
            {"max_num_batched_tokens": None, "enable_chunked_prefill": False}, 2048, False, id="whole-prompts"
        ),
    ],
)
def test_a_budget_that_nobody_set_follows_the_speed(make_core, monkeypatch, settings, budget, is_asked):
    asked = []
    monkeypatch.setattr(FakeExecutor, "fit_step", lambda self: asked.append(self) or StepFit(num_tokens=16))
    core, executor = make_core(**settings)
    core.add_request(make_request("r", 100, 3))
    run(core)
    assert core.info.max_num_batched_tokens == budget
    assert max(output.total_num_scheduled_tokens for output in executor.outputs) == min(budget, 100)
    assert bool(asked) == is_asked


@pytest.mark.parametrize(
    "setting, fitting, expected", [(None, 1024, 128), (None, 16, 64), (None, 10**6, 256), (5, 1024, 5), (0, 1024, 0)]
)
def test_a_share_of_the_budget_goes_to_prompts_beside_rows_that_decode(
    make_core, monkeypatch, setting, fitting, expected
):
    monkeypatch.setattr(FakeExecutor, "fit_step", lambda self: StepFit(num_tokens=fitting))
    core, _ = make_core(max_num_batched_tokens=None, max_mixed_prefill_tokens=setting)
    assert core.config.scheduler.max_mixed_prefill_tokens == expected
    core.shutdown()


def test_a_budget_is_never_raised(make_core, monkeypatch):
    monkeypatch.setattr(FakeExecutor, "fit_step", lambda self: StepFit(num_tokens=10**6))
    assert make_core(max_num_batched_tokens=None)[0].info.max_num_batched_tokens == 2048


def test_steps_stay_open_up_to_the_setting(make_core):
    for settings, count in (({"async_scheduling": False}, 1), ({}, 2), ({"max_steps_in_flight": 3}, 3)):
        core, executor = make_core(**settings)
        executor.polls = lambda step_id: 100
        core.add_request(make_request("a", 3, 20))
        assert core.step(timeout_s=0).outputs == []
        assert len(executor.outputs) == count


def test_a_late_step_costs_a_timeout_and_no_result(make_core):
    core, executor = make_core()
    executor.polls = lambda step_id: 3 * (step_id % 4)
    request = make_request("a", 3, 9)
    core.add_request(request)
    seen, empty = [], 0
    while core.has_work():
        message = core.step(timeout_s=0)
        empty += not message.outputs
        seen += message.outputs
    assert empty > 3
    assert tokens(seen) == executor.fake_model.generate(request, max_model_len=128)[0]
    assert not executor.violations


def test_a_failed_step_ends_its_requests_and_the_next_ones_run(make_core):
    core, executor = make_core()
    executor.fails = lambda step_id: "out of memory" if step_id == 1 else None
    core.add_request(make_request("a", 3, 9))
    outputs = run(core)
    assert outputs["a"][-1].finish_reason is FinishReason.ERROR
    assert "out of memory" in outputs["a"][-1].error.message and outputs["a"][-1].error.status == 500
    request = make_request("b", 3, 5)
    core.add_request(request)
    assert tokens(run(core)["b"]) == executor.fake_model.generate(request, max_model_len=128)[0]
    assert not executor.violations


def test_a_step_that_cannot_be_launched_ends_its_requests(make_core, monkeypatch):
    core, executor = make_core()
    execute = executor.execute
    monkeypatch.setattr(executor, "execute", lambda output: execute(output) if output.step_id else 1 / 0)
    core.add_request(make_request("a", 3, 9))
    outputs = run(core)
    assert "ZeroDivisionError" in outputs["a"][-1].error.message
    request = make_request("b", 3, 5)
    core.add_request(request)
    assert tokens(run(core)["b"]) == executor.fake_model.generate(request, max_model_len=128)[0]


def test_a_bad_result_ends_its_step_only(make_core, monkeypatch):
    core, executor = make_core(async_scheduling=False)
    sample = executor._sample

    def broken(output, rows, masks):
        result = sample(output, rows, masks)
        if output.step_id == 1:
            result.token_ids = None
        return result

    monkeypatch.setattr(executor, "_sample", broken)
    core.add_request(make_request("a", 3, 9))
    outputs = run(core)
    assert outputs["a"][-1].finish_reason is FinishReason.ERROR
    core.add_request(make_request("b", 3, 5))
    assert run(core)["b"][-1].finish_reason is FinishReason.LENGTH


def test_a_failing_scheduler_ends_requests_and_not_the_engine(make_core, monkeypatch):
    core, _ = make_core()
    schedule = core._scheduler.schedule
    monkeypatch.setattr(core._scheduler, "schedule", lambda: 1 / 0)
    core.add_request(make_request("a", 3, 9))
    outputs = core.step().outputs
    assert "ZeroDivisionError" in outputs[0].error.message and outputs[0].request_id == "a"
    monkeypatch.setattr(core._scheduler, "schedule", schedule)
    core.add_request(make_request("b", 3, 2))
    assert run(core)["b"][-1].finish_reason is FinishReason.LENGTH


def test_steps_that_fail_are_counted_until_one_does_not(make_core, monkeypatch):
    core, _ = make_core()
    with monkeypatch.context() as patched:
        patched.setattr(core._scheduler, "schedule", lambda: 1 / 0)
        for count in (1, 2, 3):
            core.add_request(make_request(str(count), 3, 3))
            stats = core.step().stats
            assert stats.num_failed_steps >= count and "ZeroDivisionError" in stats.step_failure
            while core.has_work():
                core.step()
    core.add_request(make_request("last", 3, 3))
    while core.has_work():
        stats = core.step().stats or stats
    assert (stats.num_failed_steps, stats.step_failure) == (0, "")


def test_a_dead_executor_ends_the_engine_with_its_cause(make_core):
    core, executor = make_core()
    core.add_request(make_request("a", 3, 9))
    core.step()
    executor.die("worker 0 was killed")
    with pytest.raises(EngineDeadError, match="worker 0 was killed"):
        core.step()
    with pytest.raises(EngineDeadError, match="worker 0 was killed"):
        core.add_request(make_request("b", 3))
    assert core.error is not None


def test_a_failed_step_on_a_device_that_is_lost_ends_the_engine(make_core, monkeypatch):
    core, executor = make_core()
    executor.fails = lambda step_id: "an illegal memory access was encountered" if step_id == 1 else None

    def lost():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(executor, "check_device", lost)
    core.add_request(make_request("a", 3, 9))
    with pytest.raises(EngineDeadError, match="illegal memory access"):
        run(core)


def test_bad_requests_are_refused_and_do_no_harm(make_core):
    core, _ = make_core()
    with pytest.raises(RequestError, match="prompt is empty"):
        core.add_request(make_request("a", []))
    assert not core.has_work()
    core.add_request(make_request("a", 3, 2))
    assert len(run(core)["a"]) == 2


def test_abort_tells_once_and_stop_not_at_all(make_core):
    core, executor = make_core()
    for name in "ab":
        core.add_request(make_request(name, 3, 90))
    core.step()
    core.finish_requests(["a", "unknown"], FinishReason.ABORT)
    core.finish_requests(["b"], FinishReason.STOP)
    assert core.has_work()
    message = core.step()
    assert [(output.request_id, output.finish_reason) for output in message.outputs] == [("a", FinishReason.ABORT)]
    run(core)
    assert core.call("kv_cache_usage") == 0.0 and not executor.violations


def test_stats_fall_to_zero_after_the_last_request_ended(make_core):
    core, _ = make_core()
    core.add_request(make_request("a", 3, 90))
    first = core.step().stats
    assert first.num_running_reqs == 1 and first.kv_cache_usage > 0
    core.finish_requests(["a"], FinishReason.STOP)
    last = None
    while core.has_work():
        last = core.step().stats or last
    assert (last.num_running_reqs, last.num_waiting_reqs, last.kv_cache_usage) == (0, 0, 0.0)


def test_stats_publish_host_time_by_stage(make_core):
    core, _ = make_core()
    core.add_request(make_request("a", 3, 4))
    stages = set()
    while core.has_work():
        stats = core.step().stats
        if stats is not None:
            spent = stats.host_time_s
            assert spent["step"] == pytest.approx(sum(spent.get(stage, 0.0) for stage in HOST_STAGES), abs=1e-12)
            stages |= spent.keys()
    assert stages == {*HOST_STAGES, "wait", "step"}


def test_outputs_carry_the_engines_monotonic_stamp(make_core):
    core, _ = make_core()
    before = time.monotonic()
    core.add_request(make_request("a", 3, 1))
    message = core.step()
    events = message.outputs[0].events
    assert before <= events[0].timestamp <= events[1].timestamp <= message.timestamp <= time.monotonic()


def test_a_deadline_passes_while_the_engine_steps(make_core):
    core, _ = make_core(max_model_len=4000, num_gpu_blocks_override=1100)
    core.add_request(make_request("a", 3, None, timeout_s=0.05))
    outputs = run(core)
    assert outputs["a"][-1].error.kind == "DeadlineExceededError"
    assert core.call("kv_cache_usage") == 0.0


class _Entry:
    """A structured-output backend that needs no plugin."""

    name, plugin = "fake", "the test"

    def resolve(self):
        return FakeGrammarBackend


def test_masks_reach_the_executor_in_order(plugins, monkeypatch):
    entries = type(plugins).entries
    offer = "pelton_structured_output_backends"
    monkeypatch.setattr(
        type(plugins), "entries", lambda self, hook, **a: [_Entry()] if hook == offer else entries(self, hook, **a)
    )
    for overlap, goes_past in itertools.product((1, 2, 3), (False, True)):
        config = EngineConfig.from_flat(
            max_num_seqs=4, max_num_batched_tokens=32, num_gpu_blocks_override=50, max_steps_in_flight=overlap
        )
        model = fake_resolved_model(max_model_len=128)
        model = type(model)(**{**{n: getattr(model, n) for n in model.__struct_fields__}, "tokenizer_path": "fake"})
        executor = FakeExecutor(config, model)
        executor.launches_past_masks, launched_past = goes_past, []
        execute = executor.execute

        def noted(output, execute=execute, executor=executor, launched_past=launched_past):
            launched_past.append(executor.awaits_masks)
            return execute(output)

        executor.execute = noted
        core = EngineCore(config, model, plugins, executor=executor)
        constraint = StructuredOutputsParams(regex="5")
        constrained = make_request("g", 3, 20, eos_token_ids=[0], structured_outputs=constraint)
        plain = make_request("p", 4, 12)
        core.add_request(constrained)
        core.add_request(plain)
        outputs = run(core)
        grammar = FakeGrammar(5, 50, (0,))
        assert tokens(outputs["g"]) == executor.fake_model.generate(constrained, max_model_len=128, grammar=grammar)[0]
        assert tokens(outputs["p"]) == executor.fake_model.generate(plain, max_model_len=128)[0]
        assert not executor.violations
        assert any(launched_past) == (goes_past and overlap > 1)
        core.shutdown()


@pytest.fixture
def core_with_grammars(plugins, monkeypatch):
    entries, offer = type(plugins).entries, "pelton_structured_output_backends"
    monkeypatch.setattr(
        type(plugins), "entries", lambda self, hook, **a: [_Entry()] if hook == offer else entries(self, hook, **a)
    )
    config = EngineConfig.from_flat(max_num_seqs=4, max_num_batched_tokens=32, num_gpu_blocks_override=50)
    model = msgspec.structs.replace(fake_resolved_model(max_model_len=128), tokenizer_path="fake")
    executor = FakeExecutor(config, model)
    core = EngineCore(config, model, plugins, executor=executor)
    yield core, executor
    core.shutdown()


@pytest.mark.parametrize("goes_past", [False, True], ids=["in-turn", "past-masks"])
def test_a_step_without_masks_fails_and_the_engine_goes_on(core_with_grammars, goes_past, monkeypatch):
    """The worker waits for them: it has to hear that none will come."""
    core, executor = core_with_grammars
    executor.launches_past_masks = goes_past
    monkeypatch.setattr(core._scheduler, "grammar_masks", lambda output, room: 1 / 0)
    constraint = StructuredOutputsParams(regex="5")
    core.add_request(make_request("g", 3, 20, eos_token_ids=[0], structured_outputs=constraint))
    outputs = run(core)
    assert "ZeroDivisionError" in outputs["g"][-1].error.message
    request = make_request("b", 3, 5)
    core.add_request(request)
    assert tokens(run(core)["b"]) == executor.fake_model.generate(request, max_model_len=128)[0]
    assert not executor.violations


def test_a_request_that_waits_for_no_step_is_told_of(core_with_grammars, monkeypatch):
    """Nothing runs, and so nothing comes back."""
    core, _ = core_with_grammars
    monkeypatch.setattr("pelton_plugins.scheduler.gates.is_compiled", lambda request: False)
    core.add_request(make_request("g", 3, 20, structured_outputs=StructuredOutputsParams(regex="5")))
    stats = core.step().stats
    assert (stats.num_running_reqs, stats.num_waiting_reqs, stats.num_deferred_reqs) == (0, 1, 1)
    assert core.step().stats is None, "told once"
    monkeypatch.undo()
    assert len(tokens(run(core)["g"])) > 2


def test_a_scheduler_that_schedules_nothing_is_named_once(make_core, monkeypatch, caplog):
    """Requests that come meanwhile do not put it off; a step does."""
    core, _ = make_core()
    schedule, clock = core._scheduler.schedule, [0.0]
    monkeypatch.setattr(core_module.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(core._scheduler, "next_deadline", lambda: None)

    def step(seconds):
        clock[0] += seconds
        core.step(0.0)

    def hang():
        monkeypatch.setattr(core._scheduler, "schedule", lambda: None)

    hang()
    for index in range(9):
        core.add_request(make_request(f"a{index}", 3, 2))
        step(3.0)
    assert not caplog.records
    monkeypatch.setattr(core._scheduler, "schedule", schedule)
    core.step()
    hang()
    for seconds in (3.0, 20.0, 9.0):
        step(seconds)
    assert not caplog.records
    for _ in range(3):
        core.add_request(make_request(f"b{clock[0]}", 3, 2))
        step(9.0)
    (record,) = caplog.records
    assert record.getMessage().startswith("pelton_schedulers 'default' (pelton_plugins.scheduler.")
    assert " of scheduler (pelton " in record.getMessage()
    assert "has scheduled no step for 30 s, and requests wait. Look at its schedule()" in record.getMessage()
    monkeypatch.setattr(core._scheduler, "schedule", schedule)
    assert all(outputs[-1].finish_reason is FinishReason.LENGTH for outputs in run(core).values())


def test_a_call_takes_in_what_is_open_and_launches_nothing(core_with_grammars):
    core, executor = core_with_grammars
    executor.launches_past_masks = True
    constraint = StructuredOutputsParams(regex="9")
    core.add_request(make_request("g", 3, 20, eos_token_ids=[0], structured_outputs=constraint))
    while len(core._open) < 1:
        core.step()
    count = len(executor.outputs)
    assert core.call("worker.profile", 1) == "profile" and not core._open and not core._unmasked
    assert len(executor.outputs) <= count + 1, "one was launched and waited for its turn"
    assert len(tokens(run(core)["g"])) > 2
    assert not executor.violations


def test_calls_run_between_steps(make_core):
    core, executor = make_core()
    request = make_request("a", 3, 9)
    core.add_request(request)
    first = core.step().outputs
    assert core.call("worker.profile", 1) == "profile" and executor.calls == [("profile", (1,))]
    assert not core._open
    assert core.call("reset_prefix_cache") is False
    outputs = first + run(core)["a"]
    assert tokens(outputs) == executor.fake_model.generate(request, max_model_len=128)[0]
    assert core.call("reset_prefix_cache") is True
    core.call("check_health")
    with pytest.raises(RequestError, match="no such call"):
        core.call("format_disk")


def test_info_says_what_was_found(make_core, plugins):
    core, _ = make_core()
    info = core.info
    assert (info.num_blocks, info.block_size, info.max_num_seqs, info.max_num_batched_tokens) == (100, 4, 4, 32)
    assert info.kv_cache_bytes == 100 * core.plan.bytes_per_block and info.max_model_len == 128
    assert info.plugin_digest == plugins.digest() and info.report.device == "fake"
    assert info.cache_config["num_gpu_blocks"] == "100" and info.cache_config["enable_prefix_caching"] == "True"
    assert info.phase_s == {"load": 0.5}  # the executor's own, none counted twice


def test_sizes_come_from_the_platform_when_unset(make_core, monkeypatch):
    class Platform:
        default_max_num_seqs = 7
        default_max_num_batched_tokens = 99

    monkeypatch.setattr("pelton.platform.select.select_platform", lambda config, plugins: Platform())
    core, _ = make_core(max_num_seqs=None, max_num_batched_tokens=None)
    assert (core.info.max_num_seqs, core.info.max_num_batched_tokens) == (7, 99)
    core, _ = make_core(max_num_seqs=3, max_num_batched_tokens=None, enable_chunked_prefill=False)
    assert (core.info.max_num_seqs, core.info.max_num_batched_tokens) == (3, 128)


def test_steps_of_encoders_take_more_where_the_platform_says_so(plugins, monkeypatch):
    class Platform:
        default_max_num_seqs = 7
        default_max_num_batched_tokens = 99
        encoder_scale = 2

    monkeypatch.setattr("pelton.platform.select.select_platform", lambda config, plugins: Platform())

    def sizes(*, attends_both_ways, **settings):
        spec = PoolingSpec(tasks=["embed"], pooling_type="mean", attends_both_ways=attends_both_ways)
        model = msgspec.structs.replace(fake_resolved_model(), pooling=spec)
        found = core_module.resolve_sizes(EngineConfig.from_flat(**settings), model, plugins).scheduler
        return found.max_num_seqs, found.max_num_batched_tokens

    assert sizes(attends_both_ways=True) == (14, 198)
    assert sizes(attends_both_ways=True, enable_chunked_prefill=False) == (14, 256)  # max_model_len
    assert sizes(attends_both_ways=True, max_num_seqs=3) == (3, 198)
    assert sizes(attends_both_ways=False) == (7, 99)


def test_steps_take_more_where_nobody_waits_for_a_token_and_the_platform_gains_by_it(plugins, monkeypatch):
    class Platform:
        default_max_num_seqs = 7
        default_max_num_batched_tokens = 99
        encoder_scale = 2
        throughput_scale = 3

    monkeypatch.setattr("pelton.platform.select.select_platform", lambda config, plugins: Platform())

    def sizes(**settings):
        config = EngineConfig.from_flat(**settings)
        found = core_module.resolve_sizes(config, fake_resolved_model(), plugins).scheduler
        return found.max_num_seqs, found.max_num_batched_tokens

    assert sizes() == sizes(performance_mode="balanced") == (7, 99)
    assert sizes(performance_mode="throughput") == (7, 297)
    assert sizes(performance_mode="throughput", max_num_batched_tokens=50) == (7, 50)
    assert sizes(performance_mode="throughput", pipeline_parallel_size=2) == (7, 99)  # stages take turns at steps
    ranks = {"data_parallel_size": 2, "enable_expert_parallel": True}  # experts get the tokens of both
    assert sizes(performance_mode="throughput", **ranks) == (7, 99)


@pytest.mark.parametrize(
    "settings, message",
    [
        pytest.param(
            {"scheduling_policy": "lifo"}, "scheduling_policy is 'lifo'; available: fair, fcfs, priority", id="policy"
        ),
        pytest.param({"scheduler": "mine"}, "scheduler is 'mine'; available: default", id="scheduler"),
        pytest.param({"num_gpu_blocks_override": 5}, "max_model_len", id="pool"),
    ],
)
def test_wrong_settings_stop_the_start_and_the_executor(plugins, settings, message):
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "num_gpu_blocks_override": 100, **settings}
    config = EngineConfig.from_flat(**settings)
    model = fake_resolved_model(max_model_len=256)
    executor = FakeExecutor(config, model)
    with pytest.raises(ConfigError, match=message):
        EngineCore(config, model, plugins, executor=executor)
    assert executor.is_shut_down


def test_memory_that_groups_of_equal_size_cost_is_noted(plugins):
    config = EngineConfig.from_flat(max_num_seqs=4, max_num_batched_tokens=32, num_gpu_blocks_override=100)
    model = fake_resolved_model(max_model_len=128)
    layers = {f"full.{index}": full_spec(16) for index in range(11)}
    layers |= {f"window.{index}": window_spec(64, 16) for index in range(20)}
    core = EngineCore(config, model, plugins, executor=FakeExecutor(config, model, specs=layers))
    try:
        assert "KV cache: 31 layers take the memory of 33, so that groups are of equal size" in core.info.report.notes
    finally:
        core.shutdown()


def test_an_unknown_executor_is_named(plugins):
    config = EngineConfig.from_flat(distributed_executor_backend="nowhere")
    with pytest.raises(ConfigError, match="distributed_executor_backend is 'nowhere'"):
        core_module.make_executor(config, fake_resolved_model(), plugins, PluginMetrics())


def test_shutdown_is_idempotent_and_final(make_core):
    core, executor = make_core()
    core.add_request(make_request("a", 3, 9))
    core.step()
    core.shutdown()
    core.shutdown()
    assert executor.is_shut_down
    with pytest.raises(EngineDeadError, match="shut down"):
        core.step()


def test_the_fake_model_is_what_the_engine_follows(make_core):
    core, executor = make_core(FakeModel(eos_every=4))
    request = make_request("a", 6, 90, eos_token_ids=[0])
    core.add_request(request)
    outputs = run(core)["a"]
    expected, reason = executor.fake_model.generate(request, max_model_len=128)
    assert (tokens(outputs), outputs[-1].finish_reason) == (expected, reason)
    assert reason is FinishReason.STOP
