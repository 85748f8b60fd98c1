"""`AsyncLLM` over an engine in its own process: streams, aborts, slow consumers, deaths and returns."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import operator
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from pelton import AsyncLLM, EngineConfig, SamplingParams
from pelton.engine import process_client
from pelton.engine.in_process import InProcessClient
from pelton.engine.process_client import ProcessClient
from pelton.errors import ConfigError, DeadlineExceededError, EngineDeadError, EngineError, PeltonError, RequestError
from pelton.messages.outputs import EngineOutputs
from pelton.metrics.stats import IterationStats, SchedulerStats
from pelton.outputs import RequestOutput
from pelton.sampling_params import RequestOutputKind

Make = Callable[..., Any]
pytestmark = pytest.mark.usefixtures("forks")  # in test_real_model.py they are none


def params(max_tokens: int = 6, kind: RequestOutputKind = RequestOutputKind.DELTA, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, output_kind=kind, **more)


@pytest.fixture
async def make(settings: dict[str, Any]) -> AsyncIterator[Make]:
    made: list[AsyncLLM] = []

    async def make_llm(*, start: bool = True, script: dict[str, Any] | None = None, **more: Any) -> AsyncLLM:
        options = {name: more.pop(name) for name in ("start_engine", "max_restarts") if name in more}
        config = EngineConfig.from_flat(**(settings | {"plugin_config": {"fake_engine": script or {}}} | more))
        made.append(AsyncLLM(config, **options))
        if start:
            await made[-1].start()
        return made[-1]

    yield make_llm
    for llm in made:
        llm.shutdown()


async def collect(stream: AsyncIterator[RequestOutput]) -> tuple[list[int], RequestOutput]:
    """All token ids of a stream of deltas, and the last output."""
    ids: list[int] = []
    async for output in stream:
        ids += output.outputs[0].token_ids
    return ids, output


async def settles(condition: Callable[[], Any], timeout_s: float = 90.0) -> bool:
    """Whether it holds before the time is over, which no machine is so slow as to need."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        found = condition()
        if await found if asyncio.iscoroutine(found) else found:
            return True
        await asyncio.sleep(0.01)
    return False


async def blocks_are_free(llm: AsyncLLM) -> bool:
    return await settles(lambda: is_free(llm))


async def is_free(llm: AsyncLLM) -> bool:
    return bool(await llm.call("kv_cache_usage") == 0.0)


def pid(llm: AsyncLLM) -> int:
    assert isinstance(llm._client, ProcessClient)
    return llm._client.pid


async def test_streams_deltas_that_add_up(make: Make) -> None:
    llm: AsyncLLM = await make(script={"step_s": 0.005})
    outputs = [output async for output in llm.generate("abc", params(20), "r")]
    assert len(outputs) > 5
    [final] = [output async for output in llm.generate("abc", params(20, RequestOutputKind.FINAL_ONLY))]
    assert [i for output in outputs for i in output.outputs[0].token_ids] == final.outputs[0].token_ids
    assert "".join(output.outputs[0].text for output in outputs) == final.outputs[0].text
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert outputs[0].request_id == "r"
    assert llm.num_unfinished_requests == 0


async def test_many_at_once_get_what_they_get_alone(make: Make) -> None:
    llm: AsyncLLM = await make()
    prompts = [[1 + i % 11] * (1 + i % 9) for i in range(100)]
    together = await asyncio.gather(*(collect(llm.generate(p, params(1 + i % 13))) for i, p in enumerate(prompts)))
    for i in range(0, 100, 17):
        alone, _ = await collect(llm.generate(prompts[i], params(1 + i % 13)))
        assert together[i][0] == alone
    assert await blocks_are_free(llm)


@pytest.mark.parametrize("how", ["break", "aclose", "cancel"])
async def test_leaving_a_stream_aborts_it(make: Make, how: str) -> None:
    llm: AsyncLLM = await make(script={"step_s": 0.02})
    started = asyncio.Event()

    async def read() -> None:
        async for _ in llm.generate("abc", params(200)):
            started.set()

    if how == "cancel":
        task = asyncio.create_task(read())
        await started.wait()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    else:
        stream = llm.generate("abc", params(200))
        async for _ in stream:
            break
        assert llm.num_unfinished_requests == 1
        if how == "aclose":
            await stream.aclose()
        del stream
    assert await settles(lambda: llm.num_unfinished_requests == 0)
    assert await blocks_are_free(llm)


async def test_abort_ends_the_stream_with_what_there_is(make: Make) -> None:
    llm: AsyncLLM = await make(script={"step_s": 0.02})
    stream = llm.generate("abc", params(200), "r")
    first = await anext(stream)
    await llm.abort("r")
    ids, last = await collect(stream)
    assert 0 < len(first.outputs[0].token_ids) + len(ids) < 200
    assert last.finished and last.outputs[0].finish_reason == "abort"
    await llm.abort(["r", "unknown"])
    assert await blocks_are_free(llm)


async def test_a_slow_consumer_finds_its_outputs_merged(make: Make) -> None:
    llm: AsyncLLM = await make(script={"step_s": 0.01})
    stream = llm.generate("abc", params(150))
    first = await anext(stream)
    assert await settles(lambda: llm.num_unfinished_requests == 0)
    second = await anext(stream)
    assert second.finished
    assert len(first.outputs[0].token_ids) + len(second.outputs[0].token_ids) == 150
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_samples_of_one_prompt_stream_side_by_side(make: Make) -> None:
    llm: AsyncLLM = await make()
    tokens = [0, 0, 0]
    async for output in llm.generate("abc", SamplingParams(n=3, max_tokens=5, output_kind=RequestOutputKind.DELTA)):
        for completion in output.outputs:
            tokens[completion.index] += len(completion.token_ids)
    assert tokens == [5, 5, 5]


async def test_a_stop_string_frees_the_engine(make: Make) -> None:
    llm: AsyncLLM = await make()
    [free] = [o async for o in llm.generate("zz", params(60, RequestOutputKind.FINAL_ONLY, ignore_eos=True))]
    text = free.outputs[0].text
    stop = next(char for char in text if char.isascii() and char.isprintable())
    parts = [o async for o in llm.generate("zz", params(200, stop=stop, ignore_eos=True))]
    assert "".join(o.outputs[0].text for o in parts) == text[: text.index(stop)]
    assert parts[-1].outputs[0].stop_reason == stop
    assert await blocks_are_free(llm)


async def test_bad_requests_raise_and_hurt_nobody(make: Make) -> None:
    llm: AsyncLLM = await make(
        max_num_queued_tokens=5000, script={"step_s": 0.01}
    )  # the stream outlasts its first output
    for prompt, message in (
        (["x"], "integers"),
        ("", "empty"),
        ([1] * 1000, "maximum context length"),
        ("a" * 9000, "context"),
    ):
        with pytest.raises(RequestError, match=message):
            await collect(llm.generate(prompt, params()))
    stream = llm.generate("abc", params(200), "same")
    await anext(stream)
    with pytest.raises(RequestError, match="in use"):
        await collect(llm.generate("abc", params(), "same"))
    assert (await collect(stream))[1].finished
    assert llm.num_unfinished_requests == 0


async def test_a_failed_step_raises_in_its_requests_only(make: Make) -> None:
    llm: AsyncLLM = await make(script={"fail_at_step": 0})
    with pytest.raises(EngineError, match="as the script says"):
        await collect(llm.generate("abc", params()))
    assert len((await collect(llm.generate("abc", params())))[0]) == 6
    assert llm.is_healthy


async def test_steps_that_fail_one_after_another_are_told_by_its_health(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm: AsyncLLM = await make(script={"fail_before_step": 9})
    with pytest.raises(EngineDeadError, match=r"The last \d steps failed: .*as the script says"):
        for _ in range(6):  # each has one or two steps by the time that the first has failed
            with pytest.raises(EngineError, match="as the script says"):
                await collect(llm.generate("abc", params()))
            await llm.check_health()
    assert llm.is_healthy, "requests are taken all the same"
    with monkeypatch.context() as patched:
        patched.setattr("pelton.sdk.supervisor.FAILING_S", 0.0)
        await llm.check_health()
    for _ in range(9):
        with contextlib.suppress(EngineError):
            await collect(llm.generate("abc", params()))
    await llm.check_health()


async def test_a_deadline_ends_a_request(make: Make) -> None:
    llm: AsyncLLM = await make(script={"step_s": 0.05})
    with pytest.raises(RequestError) as caught:
        await collect(llm.generate("abc", params(200), timeout_s=0.2))
    assert caught.value.status == 408
    assert await blocks_are_free(llm)


# Deaths.


async def test_waiting_clients_learn_of_a_death_and_the_engine_comes_back(make: Make, tmp_path: Path) -> None:
    hold_start = tmp_path / "hold_start"
    llm: AsyncLLM = await make(script={"step_s": 0.05, "hold_start": str(hold_start)})
    streams = [llm.generate([i + 1], params(200)) for i in range(5)]
    for stream in streams:
        await anext(stream)
    first = pid(llm)
    hold_start.touch()
    os.kill(first, signal.SIGKILL)
    results = await asyncio.gather(*map(collect, streams), return_exceptions=True)
    assert all(isinstance(result, EngineDeadError) and "SIGKILL" in str(result) for result in results)
    assert llm.num_unfinished_requests == 0
    assert not llm.is_healthy and "SIGKILL" in (llm.health_reason or "")
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        await llm.check_health()
    with pytest.raises(EngineDeadError, match="New requests are refused until it is back") as caught:
        await collect(llm.generate("abc", params()))
    assert caught.value.status == 503
    hold_start.unlink()
    assert await settles(lambda: llm.is_healthy)
    await llm.check_health()
    assert pid(llm) != first
    assert len((await collect(llm.generate("abc", params())))[0]) == 6


async def test_a_poison_request_cannot_restart_the_engine_for_ever(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pelton.sdk.supervisor.BACKOFF_S", (0.0,))
    llm: AsyncLLM = await make(script={"kill_at_step": 0}, max_restarts=2)
    for _ in range(3):
        assert await settles(lambda: llm.is_healthy)
        with pytest.raises(EngineDeadError):
            await collect(llm.generate("abc", params()))
    assert await settles(lambda: "not be restarted (it failed 3 times)" in (llm.health_reason or ""))


@pytest.mark.parametrize("refused", ["_spawn", "protocol.make_socket_dir"])
async def test_a_restart_that_the_system_refuses_is_logged_and_tried_again(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, refused: str
) -> None:
    monkeypatch.setattr("pelton.sdk.supervisor.BACKOFF_S", (0.0,))
    logging.getLogger("pelton").propagate = True
    llm: AsyncLLM = await make()
    start = operator.attrgetter(refused)(process_client)
    num_tries = 0

    def refuse_once(*args: Any) -> Any:
        nonlocal num_tries
        num_tries += 1
        if num_tries == 1:
            raise OSError(12, "Cannot allocate memory")
        return start(*args)

    monkeypatch.setattr(f"pelton.engine.process_client.{refused}", refuse_once)
    os.kill(pid(llm), signal.SIGKILL)
    assert await settles(lambda: num_tries == 2 and llm.is_healthy)
    assert "The engine: restarting it failed: OSError: [Errno 12] Cannot allocate memory" in caplog.text
    assert len((await collect(llm.generate("abc", params())))[0]) == 6


async def test_a_time_limit_holds_though_the_engine_stands_still(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pelton.sdk.async_pooling.DEADLINE_GRACE_S", 0.1)
    llm: AsyncLLM = await make()
    os.kill(pid(llm), signal.SIGSTOP)
    try:
        with pytest.raises(DeadlineExceededError, match=r"time limit of .* s passed, and the engine is not responding"):
            await asyncio.wait_for(collect(llm.generate("abc", params(), timeout_s=0.2)), 90)
        assert llm.num_unfinished_requests == 0
    finally:
        os.kill(pid(llm), signal.SIGCONT)
    assert len((await collect(llm.generate("abc", params(), timeout_s=60)))[0]) == 6


async def test_start_errors_are_raised_by_start(make: Make) -> None:
    llm: AsyncLLM = await make(start=False, script={"fail_start": "no room"})
    with pytest.raises(ConfigError, match="no room"):
        await llm.start()
    assert llm.health_reason == "The engine is not started."
    with pytest.raises(ConfigError, match="no room"):  # a request starts it again
        await collect(llm.generate("abc", params()))


class SlowStart:
    """Starts engines in this process, each after `release`."""

    def __init__(self) -> None:
        self.started: list[InProcessClient] = []
        self.release = threading.Event()

    def __call__(self, *arguments: Any) -> InProcessClient:
        self.started.append(InProcessClient(*arguments))
        assert self.release.wait(90)
        return self.started[-1]


async def test_the_first_requests_start_one_engine(make: Make) -> None:
    slow = SlowStart()
    llm: AsyncLLM = await make(start=False, start_engine=slow)
    waiting = [asyncio.create_task(collect(llm.generate("abc", params()))) for _ in range(3)]
    waiting.append(asyncio.create_task(llm.start()))
    gone = asyncio.create_task(collect(llm.generate("abc", params())))
    assert await settles(lambda: slow.started)
    gone.cancel()  # the others still get the engine
    slow.release.set()
    *outputs, _ = await asyncio.gather(*waiting)
    assert [len(ids) for ids, _ in outputs] == [6, 6, 6]
    assert len(slow.started) == 1
    assert await llm.call("kv_cache_usage") == 0.0


async def test_a_call_starts_the_engine(make: Make) -> None:
    llm: AsyncLLM = await make(start=False, start_engine=InProcessClient)
    assert await llm.reset_prefix_cache()


@pytest.mark.parametrize("end", ["shutdown", "leave"])
async def test_an_engine_that_is_still_starting_is_ended_too(make: Make, end: str) -> None:
    slow = SlowStart()
    llm: AsyncLLM = await make(start=False, start_engine=slow)
    waiting = asyncio.create_task(collect(llm.generate("abc", params())) if end == "shutdown" else llm.__aenter__())
    assert await settles(lambda: slow.started)
    ended: list[float] = []
    slow.started[0].shutdown = lambda timeout_s=10.0: ended.append(timeout_s)  # type: ignore[method-assign]
    if end == "shutdown":
        llm.shutdown()
    else:
        waiting.cancel()
    slow.release.set()
    with pytest.raises((EngineDeadError, asyncio.CancelledError)):
        await waiting
    assert await settles(lambda: len(ended) == 1)


# The end.


async def test_drain_lets_running_requests_finish_and_refuses_new_ones(make: Make) -> None:
    llm: AsyncLLM = await make(script={"step_s": 0.01})
    stream = llm.generate("abc", params(150))
    first = await anext(stream)
    running = asyncio.create_task(collect(stream))
    draining = asyncio.create_task(llm.drain(90.0))
    await asyncio.sleep(0)
    with pytest.raises(EngineError, match="shutting down") as caught:
        await collect(llm.generate("abc", params()))
    assert caught.value.status == 503
    await draining
    assert len(first.outputs[0].token_ids) + len((await running)[0]) == 150


async def test_drain_ends_what_is_left_at_the_deadline(make: Make) -> None:
    llm: AsyncLLM = await make(script={"step_s": 0.05})
    running = asyncio.create_task(collect(llm.generate("abc", params(200))))
    await asyncio.sleep(0.1)
    await llm.drain(0.2)
    with pytest.raises(EngineError, match=r"did not finish within 0.2 s") as caught:
        await running
    assert caught.value.status == 503


async def test_shutdown_ends_waiting_requests(make: Make) -> None:
    llm: AsyncLLM = await make(script={"step_s": 0.1})
    running = asyncio.create_task(collect(llm.generate("abc", params(200))))
    await asyncio.sleep(0.2)
    llm.shutdown()
    llm.shutdown()
    with pytest.raises(EngineDeadError, match="shut down"):
        await running
    with pytest.raises(EngineDeadError, match=r"^The engine was shut down\.$"):
        await collect(llm.generate("abc", params()))


async def test_context_manager(settings: dict[str, Any]) -> None:
    async with AsyncLLM.from_flat(**settings) as llm:
        assert len((await collect(llm.generate("abc", params())))[0]) == 6
        assert llm.info.num_blocks == 257
    assert not llm.is_healthy


# Chat, statistics, another engine.


async def test_render_chat(make: Make) -> None:
    llm: AsyncLLM = await make(start=False)
    messages = [{"role": "user", "content": "hi"}]
    assert llm.render_chat(messages) == "hi\n"
    assert llm.tokenizer is not None
    assert llm.render_chat(messages, tokenize=True) == llm.tokenizer.encode("hi\n", add_special_tokens=False)


class Recorder:
    """A stat logger that keeps what it is told, or fails."""

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails
        self.scheduler: list[SchedulerStats] = []
        self.iterations: list[IterationStats] = []
        self.logs = 0

    def record(self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats) -> None:
        if self.fails:
            raise RuntimeError("bad logger")
        if scheduler_stats is not None:
            self.scheduler.append(scheduler_stats)
        self.iterations.append(iteration_stats)

    def log(self) -> None:
        if self.fails:
            raise RuntimeError("bad logger")
        self.logs += 1


async def test_stat_loggers_see_everything_and_cannot_hurt(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    llm: AsyncLLM = await make(start=False, disable_log_stats=False, log_stats_interval_s=0.05)
    good, bad = Recorder(), Recorder(fails=True)
    llm.stat_loggers.loggers = {"bad": bad, "good": good}
    await llm.start()
    caplog.set_level(logging.ERROR)
    logging.getLogger("pelton").propagate = True
    await asyncio.gather(*(collect(llm.generate([i + 1, 2], params(5))) for i in range(4)))
    stream = llm.generate("gone", params(200))
    await anext(stream)
    await stream.aclose()
    assert await settles(lambda: good.scheduler[-1].num_running_reqs == 0 and good.scheduler[-1].kv_cache_usage == 0)
    assert await settles(lambda: good.logs > 0)
    finished = [stats.finish_reason for batch in good.iterations for stats in batch.finished_requests]
    assert sorted(finished) == ["abort"] + ["length"] * 4
    assert sum(len(batch.time_to_first_tokens_s) for batch in good.iterations) == 5
    assert "'bad' failed in record()" in caplog.text
    logs = good.logs
    llm.shutdown()
    assert good.logs == logs + 1  # once more at the end


@pytest.mark.parametrize("end", ["death", "shutdown", "drain"])
async def test_requests_that_end_with_the_engine_are_counted_and_no_longer_shown(make: Make, end: str) -> None:
    llm: AsyncLLM = await make(start=False, disable_log_stats=False, script={"step_s": 0.03})
    seen = Recorder()
    llm.stat_loggers.loggers = {"seen": seen}
    await llm.start()
    waiting = [asyncio.create_task(collect(llm.generate([i + 1], params(200)))) for i in range(3)]
    assert await settles(lambda: seen.scheduler and seen.scheduler[-1].num_running_reqs == 3)
    if end == "death":
        os.kill(pid(llm), signal.SIGKILL)
    elif end == "shutdown":
        llm.shutdown()
    else:
        await llm.drain(0.0)
    assert all(isinstance(result, PeltonError) for result in await asyncio.gather(*waiting, return_exceptions=True))
    reasons = [one.finish_reason for batch in seen.iterations for one in batch.finished_requests]
    assert reasons == ["error"] * 3
    assert await settles(lambda: (seen.scheduler[-1].num_running_reqs, seen.scheduler[-1].kv_cache_usage) == (0, 0.0))


async def test_runs_over_an_engine_in_this_process(make: Make) -> None:
    llm: AsyncLLM = await make(start_engine=InProcessClient, script={"step_s": 0.002})
    results = await asyncio.gather(*(collect(llm.generate([i + 1], params(10))) for i in range(10)))
    assert all(len(ids) == 10 for ids, _ in results)
    stream = llm.generate("abc", params(200))
    await anext(stream)
    await stream.aclose()
    assert await blocks_are_free(llm)


class NeverWaits(InProcessClient):
    """Whenever its outputs are asked for, the next are there."""

    num_batches = 0

    async def get_outputs_async(self) -> list[EngineOutputs]:
        while not self.has_work:
            await asyncio.sleep(0.001)
        self.num_batches += 1
        return [self.get_outputs()]


async def test_an_engine_that_is_faster_than_the_front_end_does_not_starve_who_waits(make: Make) -> None:
    llm: AsyncLLM = await make(start_engine=NeverWaits)
    seen = [llm._client.num_batches async for _ in llm.generate("abc", params(60))]
    assert len(seen) > 30
    assert seen[0] < 10, "the first token was handed on when the last ones had come"


async def test_the_event_loop_keeps_running_while_the_engine_steps(make: Make) -> None:
    llm: AsyncLLM = await make(script={"step_s": 0.2})
    reading = asyncio.create_task(collect(llm.generate("abc", params(3))))
    num_turns = 0
    while not reading.done():
        await asyncio.sleep(0)
        num_turns += 1
    assert num_turns > 100, "one that waits for steps turns a few times for each"


def test_api_process_imports_no_torch(settings: dict[str, Any], fake_engine_site: Any) -> None:
    code = f"""
import asyncio, sys
from pelton import AsyncLLM, SamplingParams
async def main():
    async with AsyncLLM.from_flat(**{settings!r}) as llm:
        async for output in llm.generate("abc", SamplingParams(max_tokens=3)):
            pass
asyncio.run(main())
print({{"torch", "transformers", "uvicorn"}} & set(sys.modules))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(fake_engine_site)},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.stdout.strip() == "set()", done.stderr


async def test_a_hung_step_restarts_the_engine(make: Make) -> None:
    llm: AsyncLLM = await make(script={"hang_at_step": 4}, max_step_s=2.0)
    first = pid(llm)
    with pytest.raises(EngineDeadError, match=r"made no progress for .* s \(max_step_s is 2\)"):
        await asyncio.wait_for(collect(llm.generate("abc", params(20))), 90)
    assert await settles(lambda: llm.is_healthy)
    assert pid(llm) != first
    assert len((await collect(llm.generate("abc", params(2))))[0]) == 2


async def test_an_engine_that_is_stopped_is_replaced(make: Make) -> None:
    llm: AsyncLLM = await make(max_step_s=2.5)
    first = pid(llm)
    os.kill(first, signal.SIGSTOP)
    with pytest.raises(EngineDeadError, match="made no progress"):
        await asyncio.wait_for(collect(llm.generate("abc", params())), 90)
    assert await settles(lambda: llm.is_healthy)
    assert len((await collect(llm.generate("abc", params())))[0]) == 6
