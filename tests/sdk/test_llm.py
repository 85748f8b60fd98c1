"""`LLM` and `LLMEngine` over the fake executor: forms of prompts, nothing lost, nothing left."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pelton import LLM, LLMEngine, SamplingParams
from pelton.errors import ConfigError, EngineDeadError, QueueFullError, RequestError
from pelton.messages.outputs import EngineOutputs
from pelton.metrics.snapshot import Gauge
from pelton.metrics.stats import IterationStats, SchedulerStats
from pelton.outputs import RequestOutput
from pelton.sampling_params import RequestOutputKind
from pelton.sdk.llm import as_prompts
from pelton.sdk.progress import ProgressBar
from pelton.testing.fake_engine import EOS_ID

GREEDY = SamplingParams(temperature=0, max_tokens=6)
Make = Callable[..., LLM]


@pytest.fixture
def make(settings: dict[str, Any]) -> Iterator[Make]:
    made: list[LLM] = []

    def make_llm(*, engine_process: bool = False, script: dict[str, Any] | None = None, **more: Any) -> LLM:
        flat = settings | {"plugin_config": {"fake_engine": script or {}}} | more
        made.append(LLM(engine_process=engine_process, **flat))
        return made[-1]

    yield make_llm
    for llm in made:
        llm.shutdown()


def ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def generate(llm: LLM, prompts: Any, params: Any = GREEDY, **more: Any) -> list[list[int]]:
    return ids(llm.generate(prompts, params, use_tqdm=False, **more))


@pytest.mark.parametrize("engine_process", [False, True], ids=["in-process", "own-process"])
def test_outputs_come_in_the_order_of_the_prompts(make: Make, engine_process: bool) -> None:
    llm = make(engine_process=engine_process)
    prompts = [[i + 1] * (1 + i % 7) for i in range(40)]
    params = [SamplingParams(temperature=0, max_tokens=1 + (i * 7) % 13) for i in range(40)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert [len(output.outputs[0].token_ids) for output in outputs] == [p.max_tokens for p in params]
    assert all(output.finished and output.outputs[0].finish_reason == "length" for output in outputs)
    assert ids(outputs) == [generate(llm, [prompt], one)[0] for prompt, one in zip(prompts, params, strict=True)]
    assert llm.kv_cache_usage() == 0.0


@pytest.mark.parametrize(
    "prompts, count",
    [
        pytest.param("ab", 1, id="text"),
        pytest.param([65, 66], 1, id="ids"),
        pytest.param({"prompt": "ab"}, 1, id="dict"),
        pytest.param(["ab", [65, 66], {"prompt_token_ids": [65, 66]}, {"prompt": "ab"}], 4, id="mixed-list"),
        pytest.param([[65, 66], [65, 66]], 2, id="lists-of-ids"),
        pytest.param([], 0, id="none"),
    ],
)
def test_takes_prompts_in_every_form(make: Make, prompts: Any, count: int) -> None:
    llm = make()
    expected = generate(llm, {"prompt_token_ids": llm.get_tokenizer().encode("ab")})
    assert expected == generate(llm, [65, 66])
    assert generate(llm, prompts) == expected * count


def test_many_texts_are_tokenized_as_one_is(make: Make) -> None:
    llm = make()
    texts = ["ab", "cd é", "x"]
    together = llm.generate(texts, GREEDY, use_tqdm=False)
    assert [output.prompt for output in together] == texts
    assert ids(together) == [generate(llm, text)[0] for text in texts]


@pytest.mark.parametrize("texts", ["ab cd", ["ab cd"], ["ab cd", "x"]])
def test_tokenization_kwargs(make: Make, texts: str | list[str], model_folder: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer, processors

    with_bos = Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    with_bos.post_processor = processors.TemplateProcessing(single="<eos> $A", special_tokens=[("<eos>", EOS_ID)])
    with_bos.save(str(tmp_path / "tokenizer.json"))
    llm, many = make(tokenizer=str(tmp_path)), [texts] if isinstance(texts, str) else texts
    bare = [llm.get_tokenizer().encode(text, add_special_tokens=False) for text in many]
    assert bare != [llm.get_tokenizer().encode(text) for text in many]

    def read(params: SamplingParams | None = GREEDY, **kwargs: Any) -> list[list[int]]:
        outputs = llm.generate(texts, params, tokenization_kwargs=kwargs, use_tqdm=False)
        return [output.prompt_token_ids for output in outputs]

    assert read(add_special_tokens=False) == bare
    assert read(add_special_tokens=False, truncate_prompt_tokens=2) == [ids[-2:] for ids in bare]
    assert read(None, add_special_tokens=False, truncate_prompt_tokens=1) == [ids[-1:] for ids in bare]
    assert read(SamplingParams(truncate_prompt_tokens=1), add_special_tokens=False) == [ids[-1:] for ids in bare]
    with pytest.raises(RequestError, match="tokenization_kwargs has 'padding'; give add_special_tokens or truncate"):
        read(padding=True)
    with pytest.raises(RequestError, match="truncate_prompt_tokens"):
        read(truncate_prompt_tokens=0)


@pytest.mark.parametrize(
    "prompts, params, message",
    [
        pytest.param(["good", [10_000]], GREEDY, "Prompt 1: Token id 10000", id="bad-prompt"),
        pytest.param(["good", "good"], [GREEDY], "sampling_params has 1 entries for 2 prompts", id="too-few-params"),
        pytest.param("good", "greedy", "sampling_params has 6 entries", id="params-of-another-type"),
        pytest.param("good", SamplingParams(logprobs=100), "max_logprobs", id="bad-params"),
        pytest.param(5, GREEDY, "prompts is a int", id="number"),
    ],
)
def test_one_bad_prompt_raises_before_anything_is_queued(make: Make, prompts: Any, params: Any, message: str) -> None:
    llm = make()
    with pytest.raises(RequestError, match=message):
        llm.generate(prompts, params, use_tqdm=False)
    assert not llm.llm_engine.has_unfinished_requests()
    assert not llm.llm_engine.client.has_work
    assert len(generate(llm, "good")[0]) == 6


def test_params_are_not_changed_and_may_be_shared(make: Make) -> None:
    params = SamplingParams(temperature=0, max_tokens=None, output_kind=RequestOutputKind.DELTA)
    outputs = make(max_model_len=16).generate(["abc", "d"], params, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [13, 15]
    assert params.max_tokens is None and params.output_kind == RequestOutputKind.DELTA


def test_default_params_are_the_models(make: Make) -> None:
    llm = make(override_generation_config={"max_new_tokens": 3, "temperature": 0.5})
    assert llm.get_default_sampling_params().temperature == 0.5
    assert len(generate(llm, "a", None)[0]) == 3


def test_chat_renders_the_template_without_adding_special_tokens(make: Make) -> None:
    llm = make()
    conversation = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    [one] = llm.chat(conversation, GREEDY, use_tqdm=False)
    assert one.prompt == "hi\nyo\n"
    assert one.prompt_token_ids == llm.get_tokenizer().encode("hi\nyo\n", add_special_tokens=False)
    several = llm.chat([conversation, conversation[:1]], GREEDY, use_tqdm=False)
    assert [output.prompt for output in several] == ["hi\nyo\n", "hi\n"]
    [own] = llm.chat(conversation, GREEDY, chat_template="{{ messages | length }} {{ x }}", chat_template_kwargs={"x": "y"},
                     use_tqdm=False)  # fmt: skip
    assert own.prompt == "2 y"
    with pytest.raises(RequestError, match="exclude each other"):
        llm.chat(conversation, GREEDY, continue_final_message=True, use_tqdm=False)
    with pytest.raises(RequestError, match="chat template is broken"):
        llm.chat(conversation, GREEDY, chat_template="{% if %}", use_tqdm=False)
    with pytest.raises(RequestError, match="messages is a str"):
        llm.chat("hi", GREEDY, use_tqdm=False)  # type: ignore[arg-type]


def test_works_without_a_tokenizer(make: Make) -> None:
    llm = make(skip_tokenizer_init=True)
    [output] = llm.generate([[1, 2]], GREEDY, use_tqdm=False)
    assert (output.outputs[0].text, len(output.outputs[0].token_ids)) == ("", 6)
    with pytest.raises(RequestError, match="skip_tokenizer_init"):
        llm.generate("text", GREEDY, use_tqdm=False)
    with pytest.raises(RequestError, match="skip_tokenizer_init"):
        llm.get_tokenizer()


def test_samples_of_one_prompt(make: Make) -> None:
    [output] = make().generate("ab", SamplingParams(n=3, max_tokens=4), use_tqdm=False)
    assert [(c.index, len(c.token_ids)) for c in output.outputs] == [(0, 4), (1, 4), (2, 4)]


def test_a_stop_string_ends_the_request_in_the_engine_too(make: Make) -> None:
    llm = make()
    [free] = llm.generate("zz", SamplingParams(temperature=0, max_tokens=60, ignore_eos=True), use_tqdm=False)
    text = free.outputs[0].text
    stop = next(char for char in text if char.isascii() and char.isprintable())
    [cut] = llm.generate("zz", SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, stop=stop), use_tqdm=False)
    assert cut.outputs[0].text == text[: text.index(stop)]
    assert (cut.outputs[0].finish_reason, cut.outputs[0].stop_reason) == ("stop", stop)
    assert list(cut.outputs[0].token_ids) == list(free.outputs[0].token_ids)[: len(cut.outputs[0].token_ids)]
    assert llm.kv_cache_usage() == 0.0


def test_one_failed_request_is_an_output_and_the_others_go_on(make: Make) -> None:
    llm = make(script={"fail_at_step": 1}, max_num_seqs=1)
    outputs = llm.generate(["a", "b"], GREEDY, use_tqdm=False)
    assert [output.error is None for output in outputs] == [False, True]
    assert outputs[0].outputs[0].finish_reason == "error"
    assert "as the script says" in outputs[0].error.message  # type: ignore[union-attr]
    assert len(outputs[1].outputs[0].token_ids) == 6


def test_an_interrupt_leaves_nothing_running(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make()
    expected = generate(llm, "abc")
    client = llm.llm_engine.client
    get_outputs, calls = client.get_outputs, iter(range(100))

    def interrupted(timeout_s: float | None = None) -> EngineOutputs:
        if next(calls) == 2:
            raise KeyboardInterrupt
        return get_outputs(timeout_s)

    monkeypatch.setattr(client, "get_outputs", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["abc"] * 20, SamplingParams(max_tokens=50), use_tqdm=False)
    monkeypatch.undo()
    assert not llm.llm_engine.has_unfinished_requests()
    assert generate(llm, "abc") == expected
    assert llm.kv_cache_usage() == 0.0


def test_calls_of_several_threads_take_turns(make: Make) -> None:
    llm = make()
    prompts = [[index + 1, index + 2] for index in range(8)]
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    alone = [generate(llm, [prompt], params) for prompt in prompts]
    with ThreadPoolExecutor(8) as threads:
        together = list(threads.map(lambda prompt: generate(llm, [prompt], params), prompts))
    assert together == alone


def test_a_full_queue_takes_nothing(make: Make) -> None:
    llm = make(max_num_queued_reqs=2)
    with pytest.raises(QueueFullError):
        llm.generate(["a"] * 30, GREEDY, use_tqdm=False)
    assert not llm.llm_engine.has_unfinished_requests()
    assert len(generate(llm, "a")[0]) == 6


def test_a_dead_engine_process_is_an_error(make: Make) -> None:
    llm = make(engine_process=True, script={"kill_at_step": 2})
    with pytest.raises(EngineDeadError, match="killed by SIGKILL"):
        llm.generate("a", GREEDY, use_tqdm=False)
    assert not llm.llm_engine.has_unfinished_requests()


@pytest.mark.parametrize(
    "flat, message",
    [
        pytest.param({"max_num_seq": 5}, "Did you mean 'max_num_seqs'", id="unknown"),
        pytest.param({"block_size": 0}, "block_size is 0", id="bad-value"),
        pytest.param(
            {"performance_mode": "fast"}, "performance_mode is .fast.; use .balanced. or .throughput.", id="bad-mode"
        ),
    ],
)
def test_bad_settings_are_errors(settings: dict[str, Any], flat: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(**(settings | flat))


def test_steps_are_for_throughput_unless_told_otherwise(make: Make) -> None:
    assert make().llm_engine.config.scheduler.performance_mode == "throughput"
    assert make(performance_mode="balanced").llm_engine.config.scheduler.performance_mode == "balanced"


def test_priority_decides_who_waits(make: Make) -> None:
    llm = make(scheduling_policy="priority", max_num_seqs=1)
    outputs = llm.generate(["a", "b", "c"], GREEDY, use_tqdm=False, priority=[2, 1, 0])
    ends = [output.metrics.e2e_latency_s for output in outputs if output.metrics is not None]
    assert ends == sorted(ends, reverse=True)


def test_metrics_offline(make: Make) -> None:
    llm = make(disable_log_stats=False)
    llm.generate(["a", "b"], GREEDY, use_tqdm=False)
    values = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
    [generated] = [value for name, value in values.items() if "generation_tokens" in name and value is not None]
    assert generated == 12
    assert llm.num_preemptions() == 0
    assert make().get_metrics() == []


@pytest.mark.parametrize("engine_process", [False, True], ids=["in-process", "own-process"])
@pytest.mark.parametrize("end", ["stop", "abort"])
def test_figures_are_those_of_now_once_all_requests_have_ended(make: Make, end: str, engine_process: bool) -> None:
    engine = make(engine_process=engine_process, disable_log_stats=False).llm_engine
    [output] = make().generate("ab", SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
    engine.add_request("a", "ab", SamplingParams(temperature=0, max_tokens=100, stop=[output.outputs[0].text[1:]]))
    while engine.has_unfinished_requests():
        engine.step()
        if end == "abort":
            engine.abort_request("a")
    found = {(metric.name, *sorted(metric.labels.values())): metric for metric in engine.get_metrics()}
    assert {
        metric.value for name, metric in found.items() if isinstance(metric, Gauge) and name[0] in GAUGES_OF_REQUESTS
    } == {0.0}
    ended = [getattr(metric, "value", 0) for name, metric in found.items() if end in name]
    assert ended == [1.0]


def test_figures_do_not_wait_for_what_an_engine_never_ends(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make(disable_log_stats=False).llm_engine
    monkeypatch.setattr(type(engine.client), "has_work", True)  # such as blocks that a KV connector reads
    monkeypatch.setattr(LLMEngine.come_to_rest, "__defaults__", (0.05,))
    assert engine.get_metrics() and engine.kv_cache_usage() == 0.0


GAUGES_OF_REQUESTS = {"pelton_num_requests_running", "pelton_num_requests_waiting", "pelton_kv_cache_usage_perc"}


class Recorder:
    """A stat logger that keeps what it is told."""

    def __init__(self) -> None:
        self.scheduler: list[SchedulerStats | None] = []
        self.reasons: list[str] = []
        self.logged_after: list[int] = []  # records

    def record(self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats) -> None:
        self.scheduler.append(scheduler_stats)
        self.reasons += [one.finish_reason for one in iteration_stats.finished_requests]

    def log(self) -> None:
        self.logged_after.append(len(self.scheduler))


def recorder_of(engine: LLMEngine) -> Recorder:
    recorder = Recorder()
    engine.stat_loggers.loggers = {"recorder": recorder}  # type: ignore[dict-item]
    return recorder


def test_stat_loggers_write_once_an_interval_and_at_shutdown(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that says how many steps have been recorded."""
    records: list[SchedulerStats | None] = []
    monkeypatch.setattr("pelton.sdk.llm_engine.time", SimpleNamespace(monotonic=lambda: float(len(records))))
    llm = make(disable_log_stats=False, log_stats_interval_s=10.0)
    seen = recorder_of(llm.llm_engine)
    seen.scheduler = records
    generate(llm, ["a"] * 8, SamplingParams(temperature=0, max_tokens=60))
    assert seen.logged_after == [
        *range(seen.logged_after[0], len(records) + 1, seen.logged_after[1] - seen.logged_after[0])
    ]
    assert 10 <= seen.logged_after[0] <= 11 and 10 <= seen.logged_after[1] - seen.logged_after[0] <= 11
    before = len(seen.logged_after)
    llm.shutdown()
    llm.shutdown()
    assert len(seen.logged_after) == before + 1 and seen.logged_after[-1] == len(seen.scheduler)


@pytest.mark.parametrize("asked", [{}, {"log_stats_interval_s": 1e-4}, {"disable_log_stats": False}])
def test_log_lines_are_written_offline_when_they_are_asked_for(
    settings: dict[str, Any], asked: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "pelton")
    del settings["disable_log_stats"]
    with LLM(**settings | asked) as llm:
        generate(llm, ["a", "b"])
        assert llm.get_metrics()
    lines = [record.getMessage() for record in caplog.records if record.name == "pelton.stats"]
    assert bool(lines) == bool(asked)


def test_requests_that_end_with_the_engine_are_counted(make: Make) -> None:
    dead = make(engine_process=True, disable_log_stats=False, script={"kill_at_step": 2})
    seen = recorder_of(dead.llm_engine)
    with pytest.raises(EngineDeadError, match="killed by SIGKILL"):
        generate(dead, ["a", "b"])
    assert seen.reasons == ["error"] * 2 and seen.scheduler[-1] == SchedulerStats()
    engine = make(disable_log_stats=False).llm_engine
    seen = recorder_of(engine)
    for request_id in ("left", "aborted"):
        engine.add_request(request_id, "ab", SamplingParams(max_tokens=100))
    engine.step()
    engine.abort_request("aborted")
    engine.shutdown()
    assert seen.reasons == ["abort", "error"] and seen.scheduler[-1] == SchedulerStats()


def test_reset_prefix_cache(make: Make) -> None:
    llm = make()
    prompt = [[7] * 64]
    llm.generate(prompt, GREEDY, use_tqdm=False)
    assert llm.generate(prompt, GREEDY, use_tqdm=False)[0].num_cached_tokens == 48
    assert llm.reset_prefix_cache()
    assert llm.generate(prompt, GREEDY, use_tqdm=False)[0].num_cached_tokens == 0


def test_the_start_table_is_logged(
    make: Make, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "pelton")
    make()
    text = caplog.text + capsys.readouterr().err
    for part in ("LlamaForCausalLM", "attention", "fake (a test)", "257 blocks of 16 tokens", "max_model_len 256"):
        assert part in text


def test_progress_shows_tokens_per_second(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    llm = make()
    capsys.readouterr()
    llm.generate(["ab", "cd"], GREEDY)
    assert "2/2" in capsys.readouterr().err
    bar = ProgressBar("generate", 4)
    bar.update(1, 100, 20)
    line = bar.line(bar._start + 10.0)
    assert line == "generate [######..................] 1/4 in 10.0 s, 30 s left; tokens/s: 10 in, 2 out"


def test_as_prompts_tells_one_from_many() -> None:
    assert as_prompts("a") == ["a"]
    assert as_prompts([1, 2]) == [[1, 2]]
    assert as_prompts([[1], "a"]) == [[1], "a"]
    assert as_prompts(("a", "b")) == ["a", "b"]


def test_an_engine_is_given_all_requests_at_once(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has several engines can share them out."""
    llm, given = make(), []
    add = llm.llm_engine.client.add_requests
    monkeypatch.setattr(
        llm.llm_engine.client, "add_requests", lambda requests: (given.append(len(requests)), add(requests))
    )
    assert len(generate(llm, [[1], [2], [3]], SamplingParams(n=2, max_tokens=2, seed=1))) == 3
    assert given == [6]


def test_the_garbage_collector_does_not_look_while_the_device_waits(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not from the first prompt that is checked to the first step's result; and then again."""
    llm = make()
    processor, scheduler = llm.llm_engine.input_processor, llm.llm_engine.client._core._scheduler  # type: ignore[attr-defined]
    was_on: list[tuple[str, bool]] = []

    def noting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **more: (was_on.append((name, gc.isenabled())), function(*args, **more))[1]

    monkeypatch.setattr(processor, "process", noting("process", processor.process))
    monkeypatch.setattr(scheduler, "schedule", noting("schedule", scheduler.schedule))
    monkeypatch.setattr(scheduler, "update", noting("update", scheduler.update))
    assert gc.isenabled()
    generate(llm, [[1], [2]])
    assert was_on[:3] == [("process", False), ("process", False), ("schedule", False)]
    assert was_on[-1] == ("update", True) and gc.isenabled()
    with pytest.raises(RequestError):
        generate(llm, [[1], []])
    assert gc.isenabled()


def test_a_bad_prompt_is_refused_while_another_thread_has_the_engine(make: Make) -> None:
    llm, is_held, may_go = make(), threading.Event(), threading.Event()

    def hold() -> None:
        with llm.llm_engine.turn:
            is_held.set()
            may_go.wait(30)

    other = threading.Thread(target=hold)
    other.start()
    assert is_held.wait(30)
    with pytest.raises(RequestError):
        generate(llm, [[1], []])
    assert other.is_alive() and gc.isenabled()
    may_go.set()
    other.join()


# LLMEngine.


def test_engine_steps_requests_that_come_and_go(settings: dict[str, Any]) -> None:
    engine = LLMEngine.from_engine_args(**settings)
    assert not engine.has_unfinished_requests() and engine.step() == []
    engine.add_request("a", "ab", SamplingParams(temperature=0, max_tokens=3))
    seen = [len(output.outputs[0].token_ids) for output in engine.step()]
    engine.add_request("b", [1, 2], SamplingParams(temperature=0, max_tokens=2))
    engine.add_request("c", "gone", SamplingParams(max_tokens=100))
    engine.abort_request("c")
    engine.abort_request(["unknown"])
    finished = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            assert output.request_id != "c"
            if output.request_id == "a":
                seen.append(len(output.outputs[0].token_ids))
            if output.finished:
                finished[output.request_id] = len(output.outputs[0].token_ids)
    assert seen == [1, 2, 3]  # cumulative, every step
    assert finished == {"a": 3, "b": 2}
    with pytest.raises(RequestError, match="vocabulary"):
        engine.add_request("d", [999])
    assert engine.get_num_unfinished_requests() == 0
    engine.shutdown()
    with pytest.raises(EngineDeadError):
        engine.add_request("e", "ab")
    assert not engine.has_unfinished_requests()


def test_import_is_light() -> None:
    code = "import pelton, sys; pelton.LLM, pelton.AsyncLLM, pelton.LLMEngine; print({'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "set()"
