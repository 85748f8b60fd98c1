"""From engine outputs to request outputs: text, stops, logprobs, samples, intervals on two clocks."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import pytest
from pelton_pace import store_s

from pelton.config import EngineConfig
from pelton.engine.input_processor import InputProcessor
from pelton.engine.output_processor import OutputProcessor, Processed
from pelton.engine.output_queue import OutputQueue
from pelton.errors import EngineDeadError, EngineError, ErrorInfo, QueueFullError, RequestError
from pelton.messages.outputs import (
    EngineEvent,
    EngineOutput,
    EngineOutputs,
    EventType,
    FinishReason,
    LogprobColumns,
)  # fmt: skip
from pelton.outputs import CompletionOutput, Logprob, RequestOutput
from pelton.sampling_params import RequestOutputKind, SamplingParams
from pelton.testing.fake_model import fake_resolved_model
from pelton.tokenizer import Tokenizer

DELTA, CUMULATIVE, FINAL_ONLY = RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE, RequestOutputKind.FINAL_ONLY


class Bench:
    """A processor fed by hand. Text is one byte a token."""

    def __init__(self, tokenizer: Tokenizer | None, **flat: Any) -> None:
        config = EngineConfig.from_flat(**flat)
        self.tokenizer = tokenizer
        self.inputs = InputProcessor(config, fake_resolved_model(vocab_size=300, max_model_len=512), tokenizer)
        self.processor = OutputProcessor(tokenizer, config)
        self.clock = 0.0

    def add(
        self, request_id: str = "r", *, arrival: float = 0.0, queue: OutputQueue | None = None, **params: Any
    ) -> None:
        processed = self.inputs.process(request_id, [9, 8, 7], SamplingParams(**params))
        for index, request in enumerate(processed.requests):  # ids that tests can name
            request.request_id = request_id if len(processed.requests) == 1 else f"{index}_{request_id}"
        self.processor.add(processed, arrival=arrival, queue=queue)

    def step(self, *outputs: EngineOutput, stamp: float = 0.0, now: float = 0.0) -> Processed:
        return self.processor.process(EngineOutputs(outputs=list(outputs), timestamp=stamp), now)

    def ids(self, text: str) -> list[int]:
        assert self.tokenizer is not None
        return self.tokenizer.encode(text)

    def say(self, text: str, request_id: str = "r", **fields: Any) -> Processed:
        return self.step(EngineOutput(request_id=request_id, new_token_ids=self.ids(text), **fields))


@pytest.fixture
def bench(tokenizer: Tokenizer) -> Bench:
    return Bench(tokenizer)


def _seconds(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def only(done: Processed) -> CompletionOutput:
    [output] = done.outputs
    [completion] = output.outputs
    return completion


def said(done: Processed) -> tuple[str, int, str | None]:
    completion = only(done)
    return completion.text, len(completion.token_ids), completion.finish_reason


# Kinds of output.


def test_cumulative_outputs_hold_everything_so_far(bench: Bench) -> None:
    bench.add(output_kind=CUMULATIVE)
    assert said(bench.say("ab")) == ("ab", 2, None)
    assert said(bench.say("c")) == ("abc", 3, None)
    done = bench.say("d", finish_reason=FinishReason.LENGTH)
    assert said(done) == ("abcd", 4, "length")
    assert done.outputs[0].finished
    assert bench.processor.num_unfinished == 0


def test_earlier_cumulative_outputs_do_not_change_later(bench: Bench) -> None:
    bench.add(output_kind=CUMULATIVE)
    first = only(bench.say("ab"))
    bench.say("c")
    assert (first.text, len(first.token_ids)) == ("ab", 2)


def test_delta_outputs_hold_what_is_new(bench: Bench) -> None:
    bench.add(output_kind=DELTA)
    assert said(bench.say("ab")) == ("ab", 2, None)
    assert said(bench.say("c")) == ("c", 1, None)
    assert said(bench.step(EngineOutput(request_id="r", finish_reason=FinishReason.STOP))) == ("", 0, "stop")


def test_final_only_says_nothing_before_the_end(bench: Bench) -> None:
    bench.add(output_kind=FINAL_ONLY)
    assert bench.say("ab").outputs == []
    assert said(bench.say("c", finish_reason=FinishReason.LENGTH)) == ("abc", 3, "length")


@pytest.mark.parametrize("kind", [DELTA, CUMULATIVE])
def test_stream_interval_groups_tokens_but_not_the_first(tokenizer: Tokenizer, kind: RequestOutputKind) -> None:
    bench = Bench(tokenizer, stream_interval=3)
    bench.add(output_kind=kind)
    assert len(bench.say("a").outputs) == 1
    assert [len(bench.say(char).outputs) for char in "bcdefg"] == [0, 0, 1, 0, 0, 1]
    done = bench.say("h", finish_reason=FinishReason.LENGTH)
    assert said(done)[0] == ("h" if kind == DELTA else "abcdefgh")


def test_half_a_character_is_never_given_out(bench: Bench) -> None:
    bench.add(output_kind=DELTA)
    ids = bench.ids("é")
    assert len(ids) == 2
    assert only(bench.step(EngineOutput(request_id="r", new_token_ids=ids[:1]))).text == ""
    assert only(bench.step(EngineOutput(request_id="r", new_token_ids=ids[1:]))).text == "é"


def test_tokens_without_text(tokenizer: Tokenizer) -> None:
    for bench in (Bench(None), Bench(tokenizer)):
        bench.add(detokenize=False, output_kind=FINAL_ONLY)
        bench.step(EngineOutput(request_id="r", new_token_ids=[1, 2]))
        done = only(bench.step(EngineOutput(request_id="r", new_token_ids=[3], finish_reason=FinishReason.LENGTH)))
        assert (done.text, done.token_ids) == ("", [1, 2, 3])


def test_special_tokens_are_left_out_or_kept(bench: Bench) -> None:
    eos = 0
    for skip, text in ((True, "a"), (False, "a<eos>")):
        bench.add(skip_special_tokens=skip, output_kind=FINAL_ONLY)
        done = bench.step(
            EngineOutput(request_id="r", new_token_ids=[*bench.ids("a"), eos], finish_reason=FinishReason.STOP)
        )
        assert said(done) == (text, 2, "stop")


def test_stop_token_ids_stay_in_the_output(bench: Bench) -> None:
    [x] = bench.ids("x")
    bench.add(stop_token_ids=[x], output_kind=FINAL_ONLY)
    done = bench.say("abx", finish_reason=FinishReason.STOP, stop_reason=x)
    assert said(done) == ("abx", 3, "stop")
    assert only(done).stop_reason == x


# Stop strings.


def test_a_stop_string_cuts_text_and_tokens_and_stops_the_engine(bench: Bench) -> None:
    bench.add(stop=["END"], output_kind=FINAL_ONLY)
    assert bench.say("hello E").stopped == []
    done = bench.say("ND and more")  # several tokens in one step: those after the stop do not count
    assert done.stopped == ["r"]
    assert said(done) == ("hello ", len("hello END"), "stop")
    assert only(done).stop_reason == "END"
    assert done.stats.finished_requests[0].num_generation_tokens == len("hello END")
    assert bench.say("late").outputs == []  # what the engine sampled before it knew


def test_a_stop_string_beats_the_length_limit_of_the_same_step(bench: Bench) -> None:
    bench.add(stop="b", output_kind=FINAL_ONLY)
    done = bench.say("ab", finish_reason=FinishReason.LENGTH)
    assert said(done) == ("a", 2, "stop")
    assert done.stopped == []  # the engine ended it already


def test_stop_string_can_be_kept(bench: Bench) -> None:
    bench.add(stop=["END"], include_stop_str_in_output=True, output_kind=FINAL_ONLY)
    assert said(bench.say("a END b"))[0] == "a END"


def test_streaming_never_shows_part_of_a_stop_string(bench: Bench) -> None:
    bench.add(stop=["END"], output_kind=DELTA)
    texts = [only(bench.say(char)).text for char in "xEEN"]
    assert texts == ["x", "", "E", ""]
    assert said(bench.say("D")) == ("", 1, "stop")


def test_held_back_text_comes_out_at_another_end(bench: Bench) -> None:
    bench.add(stop=["END"], output_kind=DELTA)
    assert only(bench.say("aEN")).text == "a"
    assert said(bench.say("!", finish_reason=FinishReason.LENGTH)) == ("EN!", 1, "length")


def test_stop_strings_count_only_after_min_tokens(bench: Bench) -> None:
    bench.add(stop=["a"], min_tokens=4, output_kind=FINAL_ONLY)
    assert bench.say("aa").stopped == []
    assert said(bench.say("bab")) == ("aab", 4, "stop")


# Logprobs.


def test_logprobs_carry_text_ranks_and_the_sampled_token(bench: Bench) -> None:
    a, b, c = bench.ids("abc")
    bench.add(logprobs=2, output_kind=CUMULATIVE)
    columns = LogprobColumns(token_ids=[[c, a, b]], logprobs=[[-3.0, -0.5, -1.0]], ranks=[7]).packed()
    done = only(bench.step(EngineOutput(request_id="r", new_token_ids=[c], logprobs=columns)))
    assert done.logprobs is not None
    [row] = done.logprobs
    assert [(token, lp.rank, lp.logprob, lp.decoded_token) for token, lp in row.items()] == [
        (c, 7, -3.0, "c"), (a, 1, -0.5, "a"), (b, 2, -1.0, "b"),
    ]  # fmt: skip
    columns = LogprobColumns(token_ids=[[a, a, b]], logprobs=[[-0.25, -0.25, -2.0]], ranks=[1]).packed()
    done = only(bench.step(EngineOutput(request_id="r", new_token_ids=[a], logprobs=columns)))
    assert done.logprobs is not None and len(done.logprobs) == 2
    assert list(done.logprobs[1]) == [a, b]
    assert done.cumulative_logprob == -3.25


def test_cumulative_logprobs_of_a_sample_that_begins_behind_the_other(bench: Bench) -> None:
    a, b, c = bench.ids("abc")
    bench.add(logprobs=2, n=2, output_kind=CUMULATIVE)
    columns = LogprobColumns(token_ids=[[c, a, b]], logprobs=[[-3.0, -0.5, -1.0]], ranks=[7]).packed()
    for index, counts in ((0, [[3], []]), (1, [[3], [3]]), (1, [[3], [3, 3]]), (0, [[3, 3], [3, 3]])):
        done = bench.step(EngineOutput(request_id=f"{index}_r", new_token_ids=[c], logprobs=columns))
        [output] = done.outputs
        assert [[len(row) for row in one.logprobs or ()] for one in output.outputs] == counts
        assert all(row[a].logprob == -0.5 for one in output.outputs for row in one.logprobs or ())


def test_logprobs_are_cut_with_the_tokens(bench: Bench) -> None:
    a, b, c = bench.ids("abc")
    bench.add(logprobs=0, stop="b", output_kind=FINAL_ONLY)
    columns = LogprobColumns(token_ids=[[a], [b], [c]], logprobs=[[-1.0], [-2.0], [-4.0]], ranks=[1, 1, 1]).packed()
    done = only(bench.step(EngineOutput(request_id="r", new_token_ids=[a, b, c], logprobs=columns)))
    assert (len(done.token_ids), len(done.logprobs or [])) == (2, 2)
    assert done.cumulative_logprob == -3.0


def test_logprobs_are_made_when_somebody_looks_and_are_like_a_list(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, c = bench.ids("abc")
    decoded: list[int] = []
    text_of = bench.tokenizer.token_text
    monkeypatch.setattr(bench.tokenizer, "token_text", lambda token: decoded.append(token) or text_of(token))
    bench.add(logprobs=1, output_kind=FINAL_ONLY)
    for chosen, rank in ((a, 1), (c, 3)):
        columns = LogprobColumns(token_ids=[[chosen, b]], logprobs=[[-1.0, -0.5]], ranks=[rank]).packed()
        bench.step(EngineOutput(request_id="r", new_token_ids=[chosen], logprobs=columns))
    done = only(bench.say("", finish_reason=FinishReason.LENGTH))
    rows = done.logprobs
    assert rows is not None and len(rows) == 2 and not decoded and done.cumulative_logprob == -2.0
    want = [
        {a: Logprob(-1.0, 1, "a"), b: Logprob(-0.5, 1, "b")},
        {c: Logprob(-1.0, 3, "c"), b: Logprob(-0.5, 1, "b")},
    ]  # fmt: skip
    assert rows == want and list(rows) == want and rows[-1] == want[1] and rows[1:] == want[1:] and rows != want[:1]
    assert [*rows, *rows] == rows + rows == want + rows == want + want  # type: ignore[operator]
    assert type(copy.deepcopy(rows)) is list, "and so in another process"
    assert copy.deepcopy(rows) == want and repr(rows) == repr(want)
    assert decoded == [a, b, c, b], "made once"


def test_prompt_logprobs_start_with_none_and_come_once_in_a_stream(bench: Bench) -> None:
    columns = LogprobColumns(token_ids=[[8], [7]], logprobs=[[-1.0], [-2.0]], ranks=[1, 2]).packed()
    bench.add(prompt_logprobs=0, output_kind=DELTA)
    [first] = bench.say("a", prompt_logprobs=columns).outputs
    assert first.prompt_logprobs is not None and first.prompt_logprobs[0] is None
    assert [list(row or {}) for row in first.prompt_logprobs] == [[], [8], [7]]
    assert bench.say("b").outputs[0].prompt_logprobs is None


# n samples.


def test_samples_come_together_at_the_end(bench: Bench) -> None:
    bench.add(n=2, output_kind=FINAL_ONLY)
    assert bench.say("b", "1_r", finish_reason=FinishReason.LENGTH).outputs == []
    done = bench.say("a", "0_r", finish_reason=FinishReason.STOP)
    [output] = done.outputs
    assert output.finished and output.request_id == "r"
    assert [(c.index, c.text, c.finish_reason) for c in output.outputs] == [(0, "a", "stop"), (1, "b", "length")]


def test_samples_stream_side_by_side(bench: Bench) -> None:
    bench.add(n=2, output_kind=DELTA)
    both = [
        EngineOutput(request_id=f"{i}_r", new_token_ids=bench.ids(char)) for i, char in enumerate("ab")
    ]  # fmt: skip
    [output] = bench.step(*both).outputs
    assert [(c.index, c.text) for c in output.outputs] == [(0, "a"), (1, "b")]
    [output] = bench.say("x", "0_r", finish_reason=FinishReason.STOP).outputs
    assert [(c.index, c.text, c.finish_reason) for c in output.outputs] == [(0, "x", "stop")]
    assert not output.finished
    [output] = bench.say("y", "1_r", finish_reason=FinishReason.STOP).outputs
    assert [(c.index, c.text) for c in output.outputs] == [(1, "y")]  # the other's end was told already
    assert output.finished


# Ends from outside.


def test_ids_of_unfinished_requests_cannot_be_used_again(bench: Bench) -> None:
    bench.add("r")
    with pytest.raises(RequestError, match="in use"):
        bench.add("r")
    bench.add("0_s")
    with pytest.raises(RequestError, match="in use"):
        bench.add("s", n=2)
    bench.say("a", finish_reason=FinishReason.STOP)
    bench.add("r")


def test_abort_forgets_and_names_the_engines_ids(bench: Bench) -> None:
    bench.add("r", n=3)
    bench.say("a", "1_r", finish_reason=FinishReason.STOP)
    assert bench.processor.abort(["r", "unknown"]) == ["0_r", "2_r"]
    assert bench.processor.num_unfinished == 0
    done = bench.say("b", "0_r")
    assert done.outputs == []
    assert [stats.finish_reason for stats in done.stats.finished_requests] == ["abort", "abort"]


async def test_abort_ends_a_waiting_consumer(bench: Bench) -> None:
    queue = OutputQueue()
    bench.add("r", queue=queue, output_kind=DELTA)
    bench.say("abc")
    assert (await queue.get()).outputs[0].text == "abc"
    bench.processor.abort(["r"])
    last = await queue.get()
    assert last.finished and last.outputs[0].finish_reason == "abort"


def test_a_failed_sample_fails_its_request_and_no_other(bench: Bench) -> None:
    bench.add("r", n=2, output_kind=FINAL_ONLY)
    bench.add("other", output_kind=FINAL_ONLY)
    error = EngineError("NaN logits").to_info()
    done = bench.step(EngineOutput(request_id="0_r", finish_reason=FinishReason.ERROR, error=error))
    assert done.aborted == ["1_r"]
    [output] = done.outputs
    assert output.finished and output.error == error
    assert [c.finish_reason for c in output.outputs] == ["error", "abort"]
    assert said(bench.say("ok", "other", finish_reason=FinishReason.STOP)) == ("ok", 2, "stop")


@pytest.mark.parametrize("kind", [DELTA, CUMULATIVE, FINAL_ONLY])
@pytest.mark.parametrize("part", ["detokenizer", "logprobs"])
def test_a_part_that_raises_ends_its_request_and_no_other(bench: Bench, part: str, kind: RequestOutputKind) -> None:
    for name in ("r", "other"):
        bench.add(name, output_kind=kind, logprobs=1 if part == "logprobs" and name == "r" else None)

    def broken(*args: Any) -> Any:
        raise RuntimeError("broken")

    sequence = bench.processor._sequences["r"]
    bad: dict[str, Any] = {}
    if part == "detokenizer":
        sequence.detokenizer.step = broken
    else:
        bad = {"logprobs": object()}
    done = bench.step(
        EngineOutput(request_id="r", new_token_ids=bench.ids("ab"), finish_reason=FinishReason.STOP, **bad),
        EngineOutput(request_id="other", new_token_ids=bench.ids("ok"), finish_reason=FinishReason.STOP),
    )
    ends = {output.request_id: output for output in done.outputs}
    assert ends["r"].error is not None
    assert (ends["other"].outputs[0].text, ends["other"].error) == ("ok", None)
    assert bench.processor.num_unfinished == 0


def test_refusals_of_admission_are_counted_by_reason(bench: Bench) -> None:
    bench.add("r")
    error = ErrorInfo(kind=QueueFullError.__name__, message="full", param="max_num_queued_tokens", status=503)
    done = bench.step(EngineOutput(request_id="r", finish_reason=FinishReason.ERROR, error=error))
    assert done.stats.num_rejected_reqs == {"max_num_queued_tokens": 1}
    assert done.stats.finished_requests == []


async def test_fail_all_reaches_every_consumer(bench: Bench) -> None:
    queues = [OutputQueue(), OutputQueue()]
    for index, queue in enumerate(queues):
        bench.add(str(index), queue=queue, output_kind=DELTA)
    bench.say("a", "0")
    bench.processor.fail_all(EngineDeadError("gone"))
    assert bench.processor.num_unfinished == 0
    for queue in queues:
        with pytest.raises(EngineDeadError, match="gone"):
            await queue.get()


def test_fail_all_counts_what_it_ends_and_aborts_that_no_batch_carried(bench: Bench) -> None:
    bench.add("two", n=2)
    bench.add("aborted")
    bench.add("waiting", arrival=4.0)
    bench.say("abc", "0_two", finish_reason=FinishReason.LENGTH)
    bench.say("a", "1_two")
    bench.processor.abort(["aborted"])
    lost = bench.processor.fail_all(EngineDeadError("gone"), now=9.0).finished_requests
    assert [(one.finish_reason, one.num_generation_tokens, one.max_num_generation_tokens) for one in lost] == [
        ("abort", 0, 0), ("error", 1, 3), ("error", 0, 0),
    ]  # fmt: skip
    assert lost[-1].e2e_latency_s == 5.0
    assert bench.processor.fail_all(EngineDeadError("gone")).finished_requests == []


def test_the_sample_that_ends_last_tells_of_the_longest(bench: Bench) -> None:
    bench.add(n=3, output_kind=FINAL_ONLY)
    told = []
    for index, text in ((1, "abcd"), (0, "ab"), (2, "a")):
        [one] = bench.say(text, f"{index}_r", finish_reason=FinishReason.LENGTH).stats.finished_requests
        told.append((one.num_generation_tokens, one.max_num_generation_tokens))
    assert told == [(4, None), (2, None), (1, 4)]


# Intervals.


def event(kind: EventType, stamp: float) -> EngineEvent:
    return EngineEvent(kind, stamp)


def test_intervals_of_the_worked_example(bench: Bench) -> None:
    """Queued 0, scheduled 1, tokens 3, 4, (preempted 5, scheduled 9) 11. The front end's clock runs a million ahead."""
    ahead = 1e6
    bench.add(arrival=ahead - 0.5, output_kind=FINAL_ONLY)
    events = [event(EventType.QUEUED, 0.0), event(EventType.SCHEDULED, 1.0)]
    first = bench.step(
        EngineOutput(request_id="r", new_token_ids=[1], events=events, num_cached_tokens=2), stamp=3.0, now=ahead + 3.25
    ).stats
    assert (first.num_prompt_tokens, first.num_cached_prompt_tokens, first.num_generation_tokens) == (3, 2, 1)
    assert first.time_to_first_tokens_s == [3.75]
    assert first.inter_token_latencies_s == []
    second = bench.step(EngineOutput(request_id="r", new_token_ids=[1]), stamp=4.0, now=ahead + 4.0).stats
    assert (second.num_prompt_tokens, second.inter_token_latencies_s) == (0, [1.0])
    events = [event(EventType.PREEMPTED, 5.0), event(EventType.SCHEDULED, 9.0)]
    done = bench.step(
        EngineOutput(request_id="r", new_token_ids=[1], events=events, finish_reason=FinishReason.LENGTH),
        stamp=11.0,
        now=ahead + 11.5,
    )
    assert done.stats.inter_token_latencies_s == [7.0]
    assert done.stats.num_preempted_reqs == 1
    [finished] = done.stats.finished_requests
    assert (finished.queue_time_s, finished.prefill_time_s, finished.decode_time_s) == (1.0, 2.0, 8.0)
    assert (finished.inference_time_s, finished.e2e_latency_s) == (10.0, 12.0)
    assert (finished.mean_time_per_output_token_s, finished.num_preemptions) == (4.0, 1)
    assert (finished.num_prompt_tokens, finished.num_generation_tokens, finished.num_cached_tokens) == (3, 3, 2)
    metrics = done.outputs[0].metrics
    assert metrics is not None
    assert (metrics.time_to_first_token_s, metrics.queue_time_s, metrics.e2e_latency_s) == (3.75, 1.0, 12.0)
    assert done.outputs[0].num_cached_tokens == 2


def test_a_preemption_in_prefill_counts_into_prefill_and_ttft(bench: Bench) -> None:
    bench.add(arrival=100.0, output_kind=FINAL_ONLY)
    bench.step(
        EngineOutput(
            request_id="r",
            events=[event(EventType.QUEUED, 0.0), event(EventType.SCHEDULED, 1.0), event(EventType.PREEMPTED, 2.0)],
        ),
        stamp=2.0,
        now=102.0,
    )
    done = bench.step(
        EngineOutput(
            request_id="r",
            new_token_ids=[1],
            finish_reason=FinishReason.LENGTH,
            events=[event(EventType.SCHEDULED, 6.0)],
        ),
        stamp=8.0,
        now=108.0,
    )
    [finished] = done.stats.finished_requests
    assert (finished.queue_time_s, finished.prefill_time_s, finished.decode_time_s) == (1.0, 7.0, 0.0)
    assert done.stats.time_to_first_tokens_s == [8.0]
    assert finished.mean_time_per_output_token_s is None


def test_a_request_that_never_ran_has_no_intervals(bench: Bench) -> None:
    bench.add()
    done = bench.step(
        EngineOutput(request_id="r", finish_reason=FinishReason.ABORT, events=[event(EventType.QUEUED, 0.0)])
    )
    [finished] = done.stats.finished_requests
    assert finished.finish_reason == "abort"
    assert (finished.queue_time_s, finished.prefill_time_s, finished.decode_time_s, finished.inference_time_s) == (
        None,
    ) * 4


# The queue of a slow consumer.


async def test_pending_deltas_are_merged(bench: Bench) -> None:
    queue = OutputQueue()
    bench.add(queue=queue, output_kind=DELTA, logprobs=0, n=2)
    column = LogprobColumns(token_ids=[[1]], logprobs=[[-1.0]], ranks=[1]).packed()
    bench.say("a", "0_r", logprobs=column)
    bench.say("b", "1_r", logprobs=column)
    bench.say("c", "0_r", logprobs=column)
    merged = await queue.get()
    assert [(c.index, c.text, len(c.token_ids), len(c.logprobs or [])) for c in merged.outputs] == [
        (0, "ac", 2, 2), (1, "b", 1, 1),
    ]  # fmt: skip
    bench.say("d", "0_r", finish_reason=FinishReason.STOP, logprobs=column)
    bench.say("e", "1_r", finish_reason=FinishReason.LENGTH, logprobs=column)
    last = await queue.get()
    assert last.finished
    assert [(c.text, c.finish_reason, c.cumulative_logprob) for c in last.outputs] == [
        ("d", "stop", -3.0), ("e", "length", -2.0),
    ]  # fmt: skip


async def test_merged_deltas_keep_what_the_kv_connector_says_at_the_end(bench: Bench) -> None:
    queue = OutputQueue()
    bench.add(queue=queue, output_kind=DELTA)
    bench.say("a")
    bench.say("b", finish_reason=FinishReason.STOP, kv_transfer_params={"remote": 1})
    merged = await queue.get()
    assert merged.finished and merged.kv_transfer_params == {"remote": 1}


async def test_pending_cumulative_outputs_are_replaced(bench: Bench) -> None:
    queue = OutputQueue()
    bench.add(queue=queue, output_kind=CUMULATIVE)
    for char in "abc":
        bench.say(char)
    got: RequestOutput = await queue.get()
    assert got.outputs[0].text == "abc"


def test_the_step_path_of_a_request_that_wants_ids_at_the_end_is_short() -> None:
    """0.4 µs measured on one AMD EPYC core, ten times what a store into a dict takes; the bound leaves room for a busy machine."""
    bench = Bench(None, disable_log_stats=True)
    for index in range(128):
        bench.add(str(index), max_tokens=None, output_kind=FINAL_ONLY)
    batch = EngineOutputs(outputs=[EngineOutput(request_id=str(index), new_token_ids=[1]) for index in range(128)])
    best = min(_seconds(lambda: bench.processor.process(batch, 0.0)) for _ in range(50))
    assert best / 128 < 90 * store_s()


def test_tokens_that_nobody_is_told_of_yet_count_in_all_statistics(tokenizer):
    """One output at the end, no text: the same figures as of a request that tells every token."""
    figures = {}
    for kind in (FINAL_ONLY, CUMULATIVE):
        bench = Bench(None)
        bench.add(output_kind=kind, detokenize=False)
        queued = [EngineEvent(EventType.QUEUED, 0.0), EngineEvent(EventType.SCHEDULED, 1.0)]
        first = bench.step(EngineOutput("r", [4], events=queued, num_cached_tokens=2), stamp=2.0)
        second = bench.step(EngineOutput("r", [5, 6]), stamp=3.5)
        preempted = bench.step(EngineOutput("r", [7], events=[EngineEvent(EventType.PREEMPTED, 4.0)]), stamp=6.0)
        last = bench.step(EngineOutput("r", [8], FinishReason.LENGTH), stamp=7.0, now=9.0)
        assert list(only(last).token_ids) == [4, 5, 6, 7, 8] and only(last).finish_reason == "length"
        steps = [done.stats for done in (first, second, preempted, last)]
        figures[kind] = (
            [step.num_generation_tokens for step in steps],
            [latency for step in steps for latency in step.inter_token_latencies_s],
            [step.num_preempted_reqs for step in steps],
            last.stats.finished_requests,
        )
        assert [len(done.outputs) for done in (first, second, preempted)] == [kind is CUMULATIVE] * 3
    assert figures[FINAL_ONLY] == figures[CUMULATIVE]
    assert figures[FINAL_ONLY][:3] == ([1, 2, 1, 1], [1.5, 2.5, 1.0], [0, 0, 1, 0])
