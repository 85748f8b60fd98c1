"""From `EngineOutputs` to `RequestOutput`s: text, stop strings, logprobs, n samples put together, statistics.

The step path is lean: a request that wants one output at the end and no text costs a dictionary look-up
and a list extension per step. What is kept of each request is in `request_state.py`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pelton.config import EngineConfig
from pelton.engine.input_processor import ProcessedRequest
from pelton.engine.request_state import RequestState, SequenceState, lazy_rows
from pelton.engine.stop_strings import StopMatcher
from pelton.errors import EngineError, ErrorInfo, PeltonError, RequestError
from pelton.logging import get_logger
from pelton.messages.outputs import EngineOutput, EngineOutputs, FinishReason
from pelton.metrics.stats import FinishedRequestStats, IterationStats
from pelton.outputs import CompletionOutput, PoolingRequestOutput, RequestOutput
from pelton.sampling_params import RequestOutputKind

if TYPE_CHECKING:
    from pelton.engine.output_queue import OutputQueue
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


class OutputProcessor:
    """Holds what the front end knows of unfinished requests. One thread at a time."""

    def __init__(self, tokenizer: Tokenizer | None, config: EngineConfig) -> None:
        self._tokenizer = tokenizer
        self._interval = config.scheduler.stream_interval
        self._log_stats = not config.observability.disable_log_stats
        self._requests: dict[str, RequestState] = {}
        self._sequences: dict[str, SequenceState] = {}  # by engine id
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
        request = RequestState(processed, arrival, queue, decode_token)
        for index, engine_request in enumerate(processed.requests):
            sequence = SequenceState(request, engine_request.request_id, index, *self._text_parts(processed))
            request.sequences.append(sequence)
            self._sequences[engine_request.request_id] = sequence
        self._requests[processed.request_id] = request

    def _text_parts(self, processed: ProcessedRequest) -> tuple[IncrementalDetokenizer | None, StopMatcher | None]:
        params = processed.params
        if not params.detokenize or self._tokenizer is None:
            return None, None
        from pelton.tokenizer.detokenizer import IncrementalDetokenizer

        detokenizer = IncrementalDetokenizer(
            self._tokenizer, processed.prompt_token_ids, skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
        )  # fmt: skip
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
        touched: list[RequestState] = []
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

    def _take(self, sequence: SequenceState, output: EngineOutput, stamp: float, now: float, done: Processed) -> None:
        """Take in whatever a step brought for a sequence."""
        request, stats = sequence.request, done.stats
        if output.events:
            stats.num_preempted_reqs += sequence.times.note(output.events)
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = output.num_cached_tokens
            stats.num_external_prompt_tokens += output.num_external_tokens
        if output.prompt_logprobs is not None and request.prompt_logprobs is None:
            request.prompt_logprobs = lazy_rows(output.prompt_logprobs, request.decode_token, is_prompt=True)
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

    def _fail(self, request: RequestState, error: Exception, now: float, done: Processed) -> None:
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

    def _note_first_token(self, sequence: SequenceState, stats: IterationStats, now: float) -> None:
        request = sequence.request
        ttft_s = now - request.arrival
        if request.ttft_s is None:
            request.ttft_s = ttft_s
        stats.time_to_first_tokens_s.append(ttft_s)
        stats.num_prompt_tokens += len(request.processed.prompt_token_ids)
        stats.num_cached_prompt_tokens += sequence.num_cached_tokens or 0

    def _finish(self, sequence: SequenceState, output: EngineOutput, now: float, done: Processed) -> None:
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

    def _end(self, sequence: SequenceState, now: float, finished: list[FinishedRequestStats]) -> None:
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


def _no_text(token_id: int) -> None:
    return None
