"""From `EngineOutputs` to `RequestOutput`s: text, stop strings, logprobs, n samples put together, statistics.

The step path is lean: a request that wants one output at the end and no text costs a dictionary look-up
and a list extension per step. Two clocks appear and are never mixed: the engine's stamps give queue,
prefill, decode, inference and inter-token times; the front end's own clock gives TTFT and E2E.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pelton.config import EngineConfig
from pelton.engine.input_processor import ProcessedRequest
from pelton.engine.stop_strings import StopMatcher
from pelton.errors import EngineError, ErrorInfo, PeltonError, RequestError
from pelton.logging import get_logger
from pelton.messages.outputs import EngineEvent, EngineOutput, EngineOutputs, EventType, FinishReason, PackedLogprobs
from pelton.metrics.stats import FinishedRequestStats, IterationStats
from pelton.outputs import (
    CompletionOutput,
    LazyLogprobs,
    Logprob,
    PoolingOutput,
    PoolingRequestOutput,
    PromptLogprobs,
    RequestMetrics,
    RequestOutput,
)
from pelton.sampling_params import RequestOutputKind

if TYPE_CHECKING:
    from pelton.engine.output_queue import OutputQueue
    from pelton.messages.request import TensorData
    from pelton.tokenizer import Tokenizer
    from pelton.tokenizer.detokenizer import IncrementalDetokenizer

logger = get_logger(__name__)


@dataclass(slots=True)
class Processed:
    """The results of one batch of engine outputs."""

    outputs: list[RequestOutput | PoolingRequestOutput[Any]] = field(default_factory=list)
    """Of requests without a queue."""
    stopped: list[str] = field(default_factory=list)
    """Engine ids that met a stop string here: the engine has to finish them."""
    aborted: list[str] = field(default_factory=list)
    """Engine ids whose sibling sample failed."""
    stats: IterationStats = field(default_factory=IterationStats)


class _Times:
    """Stamps of one sequence on the engine's clock; a preemption moves none of them."""

    __slots__ = ("first_token", "last_token", "num_preemptions", "queued", "scheduled")

    def __init__(self) -> None:
        self.queued: float | None = None
        self.scheduled: float | None = None
        self.first_token: float | None = None
        self.last_token: float | None = None
        self.num_preemptions = 0

    def note(self, events: Iterable[EngineEvent]) -> int:
        """Take in events; returns how many preemptions were among them."""
        preempted = 0
        for event in events:
            if event.type == EventType.QUEUED:
                self.queued = event.timestamp if self.queued is None else self.queued
            elif event.type == EventType.SCHEDULED:
                self.scheduled = event.timestamp if self.scheduled is None else self.scheduled
            elif event.type == EventType.PREEMPTED:
                preempted += 1
        self.num_preemptions += preempted
        return preempted


class _Sequence:
    """One sample of a request."""

    __slots__ = (
        "cumulative_logprob", "decode_token", "detokenizer", "engine_id", "finish_reason", "index", "logprobs", "matcher",
        "new_logprobs", "num_cached_tokens", "only_counts", "only_text", "reported_finish", "request", "sent_text",
        "sent_tokens", "stop_reason", "text", "times", "token_ids",
    )  # fmt: skip

    def __init__(
        self,
        request: _Request,
        engine_id: str,
        index: int,
        detokenizer: IncrementalDetokenizer | None,
        matcher: StopMatcher | None,
    ) -> None:
        self.request = request
        self.engine_id = engine_id
        self.index = index
        self.decode_token = request.decode_token  # the request is forgotten before the last output is made
        self.detokenizer = detokenizer
        self.matcher = matcher
        self.token_ids: list[int] = []
        self.text: list[str] = []
        self.logprobs: PackedLogprobs | None = None  # told, where outputs cumulate
        self.new_logprobs: list[PackedLogprobs] | None = None if request.params.logprobs is None else []
        self.cumulative_logprob = 0.0
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.num_cached_tokens: int | None = None
        params = request.params
        self.only_counts = detokenizer is None and params.output_kind == RequestOutputKind.FINAL_ONLY
        self.only_text = (  # a step's text may go out as it is
            detokenizer is not None
            and matcher is None
            and self.new_logprobs is None
            and len(request.processed.requests) == 1
            and request.queue is not None
            and request.queue.on_text is not None
        )
        self.sent_tokens = 0
        self.sent_text = 0
        self.reported_finish = False
        self.times = _Times()

    def append(self, new_ids: Sequence[int]) -> int:
        """Take in tokens up to a stop string; returns how many were kept."""
        detokenizer, matcher = self.detokenizer, self.matcher
        if detokenizer is None:
            self.token_ids.extend(new_ids)
            return len(new_ids)
        if matcher is None:
            self.token_ids.extend(new_ids)
            self._add_text(detokenizer.step(new_ids))
            return len(new_ids)
        for count, token_id in enumerate(new_ids, start=1):
            self.token_ids.append(token_id)
            text = detokenizer.step((token_id,))
            if len(self.token_ids) < self.request.params.min_tokens:
                self._add_text(text)
            elif text:
                self._add_text(matcher.push(text))
                if matcher.matched is not None:
                    self.finish("stop", matcher.matched)
                    return count
        return len(new_ids)

    def stream_text(self, new_ids: Sequence[int]) -> bool:
        """Give the text of tokens that are taken in already to the request's `on_text`; False when an output is due instead."""
        assert self.detokenizer is not None and self.request.queue is not None
        text = self.detokenizer.step(new_ids)
        if not text:
            return True
        if not self.text and self.request.queue.offer(text, len(self.token_ids) - self.sent_tokens):
            self.sent_tokens = len(self.token_ids)
            return True
        self.text.append(text)
        return False

    def finish(self, reason: str, stop_reason: int | str | None = None) -> None:
        """End the sequence and give out what was held back, which may itself complete a stop string."""
        if self.detokenizer is not None and (self.matcher is None or self.matcher.matched is None):
            text = self.detokenizer.finish()
            if self.matcher is not None and len(self.token_ids) >= self.request.params.min_tokens:
                text = self.matcher.push(text)
                if self.matcher.matched is None:
                    text += self.matcher.flush()
                else:
                    reason, stop_reason = "stop", self.matcher.matched
            self._add_text(text)
        self.finish_reason = reason
        self.stop_reason = stop_reason

    def _add_text(self, text: str) -> None:
        if text:
            self.text.append(text)

    def has_news(self, interval: int) -> bool:
        if self.finish_reason is not None:
            return not self.reported_finish
        unsent = len(self.token_ids) - self.sent_tokens
        return unsent >= interval or (unsent > 0 and self.sent_tokens == 0)

    def completion(self, *, delta: bool) -> CompletionOutput:
        """Return this sample's part of a `RequestOutput`, and mark it as sent."""
        finished = self.finish_reason is not None
        if delta:
            token_ids: Sequence[int] = self.token_ids[self.sent_tokens :]
            text = "".join(self.text)
            self.text.clear()
        else:
            token_ids = self.token_ids if finished else list(self.token_ids)
            text = self.text[0] if len(self.text) == 1 else "".join(self.text)
            self.text[:] = [text] if text else []
        logprobs = None if self.new_logprobs is None else self._take_logprobs(self.new_logprobs, delta=delta)
        self.sent_tokens = len(self.token_ids)
        self.reported_finish = finished
        return CompletionOutput(
            index=self.index,
            text=text,
            token_ids=token_ids,
            cumulative_logprob=None if logprobs is None else self.cumulative_logprob,
            logprobs=None if logprobs is None else _lazy_rows(logprobs, self.decode_token),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )

    def _take_logprobs(self, new: list[PackedLogprobs], *, delta: bool) -> PackedLogprobs:
        """Those that a completion tells."""
        found = PackedLogprobs.join(new)
        new.clear()
        self.cumulative_logprob += sum(found.chosen())
        if not delta:
            found = self.logprobs = found if self.logprobs is None else PackedLogprobs.join([self.logprobs, found])
        return found

    def finished_stats(self, now: float) -> FinishedRequestStats:
        times, request = self.times, self.request
        tokens = len(self.token_ids)
        decode = _between(times.first_token, times.last_token)
        return FinishedRequestStats(
            finish_reason=self.finish_reason or "abort",
            num_prompt_tokens=len(request.processed.prompt_token_ids),
            num_generation_tokens=tokens,
            max_tokens=request.params.max_tokens,
            n=request.params.n,
            num_cached_tokens=self.num_cached_tokens or 0,
            num_preemptions=times.num_preemptions,
            e2e_latency_s=now - request.arrival,
            queue_time_s=_between(times.queued, times.scheduled),
            prefill_time_s=_between(times.scheduled, times.first_token),
            decode_time_s=decode,
            inference_time_s=_between(times.scheduled, times.last_token),
            mean_time_per_output_token_s=decode / (tokens - 1) if decode is not None and tokens > 1 else None,
            max_num_generation_tokens=None if request.unfinished else max(len(s.token_ids) for s in request.sequences),
        )


class _Request:
    """One request of a user: n sequences."""

    __slots__ = (
        "arrival", "decode_token", "error", "is_touched", "kv_transfer_params", "params", "pooled", "processed", "prompt_logprobs",
        "prompt_logprobs_sent", "queue", "sequences", "ttft_s", "unfinished",
    )  # fmt: skip

    def __init__(
        self,
        processed: ProcessedRequest,
        arrival: float,
        queue: OutputQueue | None,
        decode_token: Callable[[int], str | None],
    ) -> None:
        """decode_token: text of one token, for logprobs."""
        self.processed = processed
        self.decode_token = decode_token
        self.params = processed.params
        self.arrival = arrival
        self.queue = queue
        self.sequences: list[_Sequence] = []
        self.unfinished = len(processed.requests)
        self.error: ErrorInfo | None = None
        self.kv_transfer_params: dict[str, Any] | None = None
        self.pooled: TensorData | None = None
        self.prompt_logprobs: PromptLogprobs | None = None
        self.prompt_logprobs_sent = False
        self.ttft_s: float | None = None
        self.is_touched = False

    @property
    def request_id(self) -> str:
        return self.processed.request_id

    @property
    def _awaits_prompt_logprobs(self) -> bool:
        """The first sample brings them, and another one was faster."""
        return self.params.n > 1 and self.params.prompt_logprobs is not None and self.prompt_logprobs is None

    def output(self, interval: int, now: float) -> RequestOutput | PoolingRequestOutput[Any] | None:
        """The output that is due, if one is."""
        kind, finished = self.params.output_kind, self.unfinished == 0
        if self.processed.pooling_params is not None:
            return self._pooling_output(now) if finished else None
        if not finished and (kind == RequestOutputKind.FINAL_ONLY or self._awaits_prompt_logprobs):
            return None
        news = [sequence for sequence in self.sequences if finished or sequence.has_news(interval)]
        if not news:
            return None
        if kind == RequestOutputKind.DELTA:
            outputs = [s.completion(delta=True) for s in news if not s.reported_finish]
        else:
            outputs = [s.completion(delta=False) for s in self.sequences]
        prompt_logprobs = (
            None if kind == RequestOutputKind.DELTA and self.prompt_logprobs_sent else self.prompt_logprobs
        )
        self.prompt_logprobs_sent = prompt_logprobs is not None or self.prompt_logprobs_sent
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.processed.prompt,
            prompt_token_ids=self.processed.prompt_token_ids,
            outputs=outputs,
            finished=finished,
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=self.sequences[0].num_cached_tokens,
            metrics=self._metrics(now) if finished else None,
            error=self.error,
            kv_transfer_params=self.kv_transfer_params,
        )

    def _pooling_output(self, now: float) -> PoolingRequestOutput[Any]:
        error = self.error
        if self.pooled is None and error is None:
            error = EngineError("The request was aborted.").to_info()
        return PoolingRequestOutput(
            request_id=self.request_id,
            outputs=None if self.pooled is None else PoolingOutput(self.pooled),
            prompt_token_ids=self.processed.prompt_token_ids,
            finished=True,
            prompt=self.processed.prompt,
            num_cached_tokens=self.sequences[0].num_cached_tokens,
            metrics=self._metrics(now),
            error=error,
        )

    def _metrics(self, now: float) -> RequestMetrics:
        """The first sample's metrics, with the preemptions of all."""
        times = self.sequences[0].times
        return RequestMetrics(
            arrival_time=self.arrival,
            time_to_first_token_s=self.ttft_s,
            queue_time_s=_between(times.queued, times.scheduled),
            prefill_time_s=_between(times.scheduled, times.first_token),
            decode_time_s=_between(times.first_token, times.last_token),
            inference_time_s=_between(times.scheduled, times.last_token),
            e2e_latency_s=now - self.arrival,
            num_preemptions=sum(s.times.num_preemptions for s in self.sequences),
        )


class OutputProcessor:
    """Holds what the front end knows of unfinished requests. One thread at a time."""

    def __init__(self, tokenizer: Tokenizer | None, config: EngineConfig) -> None:
        self._tokenizer = tokenizer
        self._interval = config.scheduler.stream_interval
        self._log_stats = not config.observability.disable_log_stats
        self._requests: dict[str, _Request] = {}
        self._sequences: dict[str, _Sequence] = {}  # by engine id
        self._ended_outside: list[FinishedRequestStats] = []  # aborts, until the next batch carries them

    @property
    def num_unfinished(self) -> int:
        return len(self._requests)

    def unfinished_ids(self) -> list[str]:
        return list(self._requests)

    def engine_ids(self, request_ids: Iterable[str]) -> list[str]:
        """Ids under which the engine knows the unfinished samples of these requests."""
        return [
            sequence.engine_id
            for request_id in request_ids
            if (request := self._requests.get(request_id)) is not None
            for sequence in request.sequences
            if sequence.finish_reason is None
        ]

    def add(self, processed: ProcessedRequest, *, arrival: float, queue: OutputQueue | None = None) -> None:
        """Expect outputs of a request. With a queue its outputs go there, else `process` returns them."""
        if processed.request_id in self._requests or any(r.request_id in self._sequences for r in processed.requests):
            raise RequestError(
                "request_id is in use by an unfinished request", param="request_id", value=processed.request_id
            )
        if queue is not None and (self._interval > 1 or processed.params.output_kind != RequestOutputKind.DELTA):
            queue.on_text = None
        has_text = processed.params.detokenize and self._tokenizer is not None
        decode_token = self._tokenizer.token_text if has_text and self._tokenizer is not None else _no_text
        request = _Request(processed, arrival, queue, decode_token)
        for index, engine_request in enumerate(processed.requests):
            sequence = _Sequence(request, engine_request.request_id, index, *self._text_parts(processed))
            request.sequences.append(sequence)
            self._sequences[engine_request.request_id] = sequence
        self._requests[processed.request_id] = request

    def _text_parts(self, processed: ProcessedRequest) -> tuple[IncrementalDetokenizer | None, StopMatcher | None]:
        params = processed.params
        if not params.detokenize or self._tokenizer is None:
            return None, None
        from pelton.tokenizer.detokenizer import IncrementalDetokenizer

        detokenizer = IncrementalDetokenizer(
            self._tokenizer,
            processed.prompt_token_ids,
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
        )
        stops = params.stop if isinstance(params.stop, list) else []
        return detokenizer, StopMatcher(stops, include_in_output=params.include_stop_str_in_output) if stops else None

    def abort(self, request_ids: Iterable[str], now: float | None = None) -> list[str]:
        """Forget requests; returns the engine ids to abort. A queue gets a last output with finish_reason "abort"."""
        now = time.monotonic() if now is None else now
        engine_ids: list[str] = []
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is None:
                continue
            for sequence in request.sequences:
                if sequence.finish_reason is None:
                    engine_ids.append(sequence.engine_id)
                    sequence.finish("abort")
                    self._end(sequence, now, self._ended_outside)
            if request.queue is not None and (output := request.output(self._interval, now)) is not None:
                request.queue.put(output, request.params.output_kind)
        return engine_ids

    def fail_all(self, error: PeltonError, now: float | None = None) -> IterationStats:
        """Every unfinished request ends with `error`; returns what is to be counted, aborts before it included."""
        now = time.monotonic() if now is None else now
        stats = IterationStats()
        stats.finished_requests, self._ended_outside = self._ended_outside, []
        requests = list(self._requests.values())
        for sequence in list(self._sequences.values()):
            sequence.finish_reason = str(FinishReason.ERROR)
            self._end(sequence, now, stats.finished_requests)
        self._requests.clear()  # empty, unless `process` failed half way
        for request in requests:
            request.sequences.clear()  # they point back, see `_end`
            if request.queue is not None:
                request.queue.fail(error)
        return stats

    def process(self, batch: EngineOutputs, now: float) -> Processed:
        """Take in one batch. now: the front end's monotonic clock."""
        done = Processed()
        stats = done.stats
        if self._ended_outside:
            stats.finished_requests, self._ended_outside = self._ended_outside, []
        sequences, stamp, log_stats = self._sequences, batch.timestamp, self._log_stats
        latencies, num_plain = stats.inter_token_latencies_s, 0
        touched: list[_Request] = []
        for output in batch.outputs:
            sequence = sequences.get(output.request_id)
            if sequence is None:
                continue  # ended here already: aborted, or cut at a stop string
            is_plain = not output.events and output.finish_reason is None
            if is_plain and (sequence.only_counts or sequence.only_text):
                tokens, times = output.new_token_ids, sequence.times
                if tokens and times.last_token is not None:
                    sequence.token_ids += tokens
                    num_plain += len(tokens)
                    if log_stats:
                        latencies.append(stamp - times.last_token)
                    times.last_token = stamp
                    if sequence.only_counts:
                        # Nothing is due before the end. Nearly all outputs of an offline run come here.
                        if output.logprobs is not None and sequence.new_logprobs is not None:
                            sequence.new_logprobs.append(output.logprobs)
                        continue
                    request = sequence.request
                    try:
                        has_gone = sequence.stream_text(tokens)
                    except Exception as error:
                        self._fail(request, error, now, done)
                        continue
                    if not has_gone and not request.is_touched:
                        request.is_touched = True
                        touched.append(request)
                    continue
            request = sequence.request
            try:
                self._take(sequence, output, stamp, now, done)
            except Exception as error:
                self._fail(request, error, now, done)
                continue
            if not request.is_touched and (
                request.unfinished == 0 or request.params.output_kind != RequestOutputKind.FINAL_ONLY
            ):
                request.is_touched = True
                touched.append(request)
        stats.num_generation_tokens += num_plain
        for request in touched:
            request.is_touched = False
            try:
                result = request.output(self._interval, now)
            except Exception as error:
                self._fail(request, error, now, done)
                continue
            if result is not None:
                if request.queue is not None:
                    request.queue.put(result, request.params.output_kind)
                else:
                    done.outputs.append(result)
        return done

    def _take(self, sequence: _Sequence, output: EngineOutput, stamp: float, now: float, done: Processed) -> None:
        """Take in whatever a step brought for a sequence."""
        request, stats = sequence.request, done.stats
        if output.events:
            stats.num_preempted_reqs += sequence.times.note(output.events)
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = output.num_cached_tokens
        if output.prompt_logprobs is not None and request.prompt_logprobs is None:
            request.prompt_logprobs = _lazy_rows(output.prompt_logprobs, request.decode_token, is_prompt=True)
        if output.new_token_ids:
            kept = sequence.append(output.new_token_ids)
            stats.num_generation_tokens += kept
            times = sequence.times
            if times.last_token is None:
                times.first_token = stamp
                self._note_first_token(sequence, stats, now)
            elif self._log_stats:
                stats.inter_token_latencies_s.append(stamp - times.last_token)
            times.last_token = stamp
            if output.logprobs is not None and sequence.new_logprobs is not None:
                sequence.new_logprobs.append(output.logprobs.head(kept))
        if output.pooled is not None:
            request.pooled = output.pooled
            self._note_first_token(sequence, stats, now)
        if sequence.finish_reason is not None:  # by a stop string
            if output.finish_reason is None:
                done.stopped.append(sequence.engine_id)
            self._end(sequence, now, stats.finished_requests)
        elif output.finish_reason is not None:
            self._finish(sequence, output, now, done)

    def _fail(self, request: _Request, error: Exception, now: float, done: Processed) -> None:
        """End one request whose outputs cannot be processed; the others never notice."""
        logger.error("Processing the outputs of request %s failed; it ends.", request.request_id, exc_info=error)
        for sequence in request.sequences:
            if sequence.engine_id in self._sequences:
                sequence.finish_reason = str(FinishReason.ERROR)
                done.aborted.append(sequence.engine_id)
                self._end(sequence, now, done.stats.finished_requests)
        failure = EngineError(f"Processing the request's outputs failed: {type(error).__name__}: {error}")
        if request.queue is not None:
            request.queue.fail(failure)
            return
        ended = [
            CompletionOutput(sequence.index, "", sequence.token_ids, finish_reason=str(FinishReason.ERROR))
            for sequence in request.sequences
        ]
        done.outputs.append(
            RequestOutput(
                request.request_id, request.processed.prompt, request.processed.prompt_token_ids, ended, True,
                error=failure.to_info(),
            )
        )  # fmt: skip

    def _note_first_token(self, sequence: _Sequence, stats: IterationStats, now: float) -> None:
        request = sequence.request
        ttft_s = now - request.arrival
        if request.ttft_s is None:
            request.ttft_s = ttft_s
        stats.time_to_first_tokens_s.append(ttft_s)
        stats.num_prompt_tokens += len(request.processed.prompt_token_ids)
        stats.num_cached_prompt_tokens += sequence.num_cached_tokens or 0

    def _finish(self, sequence: _Sequence, output: EngineOutput, now: float, done: Processed) -> None:
        """The engine ended it."""
        assert output.finish_reason is not None
        if sequence.request.kv_transfer_params is None:
            sequence.request.kv_transfer_params = output.kv_transfer_params
        sequence.finish(str(output.finish_reason), output.stop_reason)
        if output.finish_reason != FinishReason.ERROR:
            self._end(sequence, now, done.stats.finished_requests)
            return
        request, error = sequence.request, output.error
        request.error = error or ErrorInfo(
            kind="EngineError", message="The engine failed this request and gave no reason."
        )
        refused = error is not None and error.kind == "QueueFullError"
        if error is not None and refused:
            rejected = done.stats.num_rejected_reqs
            reason = error.param or "max_num_queued_reqs"
            rejected[reason] = rejected.get(reason, 0) + 1
        self._end(sequence, now, [] if refused else done.stats.finished_requests)
        for sibling in request.sequences:
            if sibling.finish_reason is None:
                sibling.finish("abort")
                done.aborted.append(sibling.engine_id)
                self._end(sibling, now, [] if refused else done.stats.finished_requests)

    def _end(self, sequence: _Sequence, now: float, finished: list[FinishedRequestStats]) -> None:
        """Forget an ended sequence, and its request with the last one.

        The sequence forgets its request: a cycle would keep both, and the prompt, until the garbage collector comes,
        which stands in the way of all other requests meanwhile.
        """
        self._sequences.pop(sequence.engine_id, None)
        request = sequence.request
        request.unfinished -= 1
        finished.append(sequence.finished_stats(now))
        del sequence.request
        if request.unfinished == 0:
            self._requests.pop(request.request_id, None)


def _lazy_rows(packed: PackedLogprobs, decode: Callable[[int], str | None], *, is_prompt: bool = False) -> LazyLogprobs:
    """The rows of a prompt; None for its first token."""
    head: list[dict[int, Logprob] | None] = [None] if is_prompt else []
    return LazyLogprobs(len(head) + len(packed), lambda: [*head, *_logprob_rows(packed, decode)])


def _logprob_rows(packed: PackedLogprobs, decode: Callable[[int], str | None]) -> list[dict[int, Logprob]]:
    columns = packed.columns()
    rows: list[dict[int, Logprob]] = []
    for ids, values, rank in zip(columns.token_ids, columns.logprobs, columns.ranks, strict=True):
        row = {ids[0]: Logprob(values[0], rank, decode(ids[0]))}
        for position, token_id in enumerate(ids[1:], start=1):
            if token_id not in row:
                row[token_id] = Logprob(values[position], position, decode(token_id))
        rows.append(row)
    return rows


def _no_text(token_id: int) -> None:
    return None


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start
