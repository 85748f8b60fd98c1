"""Text that goes out without a task being woken, and requests whose outputs cannot be processed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pelton.config import EngineConfig
from pelton.engine.input_processor import InputProcessor
from pelton.engine.output_processor import OutputProcessor, Processed
from pelton.engine.output_queue import OutputQueue
from pelton.errors import EngineError
from pelton.messages.outputs import EngineOutput, EngineOutputs, FinishReason
from pelton.sampling_params import RequestOutputKind, SamplingParams
from pelton.testing.fake_model import fake_resolved_model
from pelton.tokenizer import Tokenizer


class Bench:
    def __init__(self, tokenizer: Tokenizer, **flat: Any) -> None:
        config = EngineConfig.from_flat(**flat)
        self.tokenizer = tokenizer
        self.inputs = InputProcessor(config, fake_resolved_model(vocab_size=300, max_model_len=512), tokenizer)
        self.processor = OutputProcessor(tokenizer, config)

    def add(self, request_id: str, queue: OutputQueue | None = None, **params: Any) -> None:
        params.setdefault("output_kind", RequestOutputKind.DELTA)
        processed = self.inputs.process(request_id, [9, 8, 7], SamplingParams(**params))
        processed.requests[0].request_id = request_id
        self.processor.add(processed, arrival=0.0, queue=queue)

    def say(self, text: str, *request_ids: str, **fields: Any) -> Processed:
        ids = self.tokenizer.encode(text)
        outputs = [EngineOutput(request_id=one, new_token_ids=list(ids), **fields) for one in request_ids]
        return self.processor.process(EngineOutputs(outputs=outputs), 0.0)


class Sink:
    def __init__(self) -> None:
        self.found: list[tuple[str, int]] = []
        self.takes = True

    def __call__(self, text: str, num_tokens: int) -> bool:
        if self.takes:
            self.found.append((text, num_tokens))
        return self.takes


async def consume(queue: OutputQueue, found: list[tuple[str, int]]) -> None:
    while True:
        output = await queue.get()
        found.append((output.outputs[0].text, len(output.outputs[0].token_ids)))
        if output.finished:
            return


async def test_text_goes_to_who_takes_it_while_the_consumer_sleeps(tokenizer: Tokenizer) -> None:
    bench, sink, found = Bench(tokenizer), Sink(), []
    queue = OutputQueue(sink)
    bench.add("r", queue)
    task = asyncio.create_task(consume(queue, found))
    await asyncio.sleep(0)
    bench.say("a", "r")  # the first token: times and cached tokens go with it
    bench.say("b", "r")  # the consumer has not taken that yet: joined with it
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert found == [("ab", 2)] and not sink.found
    bench.say("c", "r")
    bench.say("d", "r")
    await asyncio.sleep(0)
    assert sink.found == [("c", 1), ("d", 1)] and found == [("ab", 2)]
    sink.takes = False  # a client that reads slowly
    bench.say("e", "r")
    bench.say("f", "r")
    sink.takes = True
    bench.say("g", "r")  # in order: behind what waits
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert found == [("ab", 2), ("efg", 3)]
    bench.say("h", "r", finish_reason=FinishReason.STOP)
    await asyncio.wait_for(task, 60)
    assert found[-1] == ("h", 1) and sink.found == [("c", 1), ("d", 1)]


async def test_half_a_character_waits_with_its_tokens(tokenizer: Tokenizer) -> None:
    bench, sink, found = Bench(tokenizer), Sink(), []
    queue = OutputQueue(sink)
    bench.add("r", queue)
    task = asyncio.create_task(consume(queue, found))
    await asyncio.sleep(0)
    bench.say("a", "r")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    for token_id in tokenizer.encode("ä"):
        bench.processor.process(EngineOutputs(outputs=[EngineOutput(request_id="r", new_token_ids=[token_id])]), 0.0)
    assert sink.found == [("ä", 2)]
    task.cancel()


@pytest.mark.parametrize(
    "params",
    [
        {"logprobs": 1},
        {"stop": ["x"]},
        {"n": 2, "temperature": 1.0},
        {"output_kind": RequestOutputKind.CUMULATIVE},
        {"detokenize": False},
    ],
)
def test_outputs_that_say_more_than_text_are_put(tokenizer: Tokenizer, params: dict[str, Any]) -> None:
    bench, sink = Bench(tokenizer), Sink()
    queue = OutputQueue(sink)
    bench.add("r", queue, **params)
    assert not any(sequence.only_text for sequence in bench.processor._sequences.values())


class _Poisoned:
    """A detokenizer that fails."""

    def step(self, ids: Any) -> str:
        raise KeyError("no such token")

    finish = step


@pytest.mark.parametrize("from_token", [0, 1])
async def test_a_request_that_cannot_be_processed_ends_alone(tokenizer: Tokenizer, from_token: int) -> None:
    bench, found = Bench(tokenizer), []
    good, bad = OutputQueue(Sink()), OutputQueue(Sink())
    bench.add("bad", bad)
    bench.add("good", good)
    tasks = [asyncio.create_task(consume(queue, found)) for queue in (bad, good)]
    await asyncio.sleep(0)
    if from_token:
        bench.say("a", "bad", "good")
        await asyncio.sleep(0)
    bench.processor._sequences["bad"].detokenizer = _Poisoned()  # type: ignore[assignment]
    done = bench.say("b", "bad", "good")
    assert done.aborted == ["bad"]
    assert [stats.finish_reason for stats in done.stats.finished_requests] == ["error"]
    with pytest.raises(EngineError, match="KeyError: 'no such token'"):
        await asyncio.wait_for(tasks[0], 60)
    bench.say("c", "bad", "good", finish_reason=FinishReason.STOP)
    await asyncio.wait_for(tasks[1], 60)
    assert bench.processor.num_unfinished == 0


def test_offline_it_ends_with_the_error_as_its_output(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer)
    bench.add("bad", output_kind=RequestOutputKind.FINAL_ONLY)
    bench.add("good", output_kind=RequestOutputKind.FINAL_ONLY)
    bench.processor._sequences["bad"].detokenizer = _Poisoned()  # type: ignore[assignment]
    done = bench.say("b", "bad", "good", finish_reason=FinishReason.STOP)
    by_id = {output.request_id: output for output in done.outputs}
    assert by_id["bad"].error is not None and by_id["bad"].finished
    assert by_id["good"].error is None and by_id["good"].outputs[0].text == "b"
