"""Conformance of IO processors: what any implementation has to keep, run with pytest.

Subclass `IOProcessorConformance` in a test module; say what is made, and what data is good and bad:

    class TestMine(IOProcessorConformance):
        good_data = {"values": [1, 2]}
        bad_data = ("text", {"values": "x"})

        def make_processor(self, context):
            return MyProcessor(context)
"""

from __future__ import annotations

import asyncio
import random
from array import array
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, ClassVar

import msgspec
import pytest

from pelton.config import EngineConfig
from pelton.engine.input_processor import Prompt
from pelton.errors import RequestError
from pelton.messages.request import PoolingParams, TensorData
from pelton.model.pooling import PoolingSpec
from pelton.model.resolved import ResolvedModel
from pelton.outputs import PoolingOutput, PoolingRequestOutput
from pelton.pooling.io_processor import IOProcessor, IOProcessorContext, parse
from pelton.sdk.prompts import as_prompts

VOCAB_SIZE, MAX_MODEL_LEN, HIDDEN_SIZE = 320, 128, 8


def make_context() -> IOProcessorContext:
    """Make the context of a model that embeds, without a tokenizer."""
    model = ResolvedModel(
        name="under-test", path="under-test", weights_format="dummy", hf_config={"hidden_size": HIDDEN_SIZE},
        architecture="BertModel", dtype="float32", max_model_len=MAX_MODEL_LEN, vocab_size=VOCAB_SIZE, eos_token_ids=[],
        generation_config={}, tokenizer_path=None,
        pooling=PoolingSpec(tasks=["embed", "token_embed"], pooling_type="mean", attends_both_ways=True),
    )  # fmt: skip
    return IOProcessorContext(engine_config=EngineConfig(), model=model, tokenizer=None)


def fake_output(request_id: str, prompt: Prompt) -> PoolingRequestOutput[PoolingOutput]:
    """A vector that says which prompt it is of."""
    ids = prompt.get("prompt_token_ids") if isinstance(prompt, Mapping) else prompt
    seed = random.Random(repr(ids if ids is not None else prompt))
    numbers = array("f", [seed.random() for _ in range(HIDDEN_SIZE)])
    tensor = TensorData(numbers.tobytes(), "float32", (HIDDEN_SIZE,))
    return PoolingRequestOutput(request_id, PoolingOutput(tensor), list(ids) if isinstance(ids, list) else [], True)


class IOProcessorConformance:
    good_data: ClassVar[Any]
    """What a client may send as `data`, plain data."""
    bad_data: ClassVar[Sequence[Any]]
    """What must be refused, one by one."""

    def make_processor(self, context: IOProcessorContext) -> IOProcessor[Any, Any]:
        raise NotImplementedError

    @pytest.fixture
    def processor(self) -> IOProcessor[Any, Any]:
        return self.make_processor(make_context())

    def test_refuses_bad_data_as_the_clients_mistake(self, processor: IOProcessor[Any, Any]) -> None:
        assert self.bad_data, "give some bad_data"
        for data in self.bad_data:
            with pytest.raises(RequestError):
                parse(processor, data)

    def test_makes_prompts_that_the_engine_takes(self, processor: IOProcessor[Any, Any]) -> None:
        prompts = self._prompts(processor, "r")
        assert prompts, "pre_process makes no prompt"
        for prompt in prompts:
            ids = prompt.get("prompt_token_ids") if isinstance(prompt, Mapping) else prompt
            if isinstance(ids, (str, type(None))):
                continue
            assert 0 < len(ids) <= MAX_MODEL_LEN, f"a prompt of {len(ids)} tokens; the model takes 1 to {MAX_MODEL_LEN}"
            assert all(type(token) is int and 0 <= token < VOCAB_SIZE for token in ids), (
                f"token ids must be integers from 0 to {VOCAB_SIZE - 1}"
            )

    def test_merges_parameters(self, processor: IOProcessor[Any, Any]) -> None:
        assert isinstance(processor.merge_pooling_params(None), PoolingParams)
        given = PoolingParams(task="token_embed")
        assert processor.merge_pooling_params(given).task == "token_embed", "the request's task is lost"

    def test_answers_are_plain_data_and_depend_on_the_data_alone(self, processor: IOProcessor[Any, Any]) -> None:
        first, second = (self._answer(processor, request_id) for request_id in ("r1", "r2"))
        assert first == second, "two equal requests have different answers"

    def test_requests_under_way_at_once_do_not_meet(self, processor: IOProcessor[Any, Any]) -> None:
        alone = self._answer(processor, "alone")
        prompts = {request_id: self._prompts(processor, request_id) for request_id in ("a", "b", "c")}
        for request_id in ("b", "c", "a"):
            outputs = [fake_output(request_id, prompt) for prompt in prompts[request_id]]
            assert msgspec.json.encode(processor.post_process(outputs, request_id)) == alone
            processor.discard(request_id)

    def test_outputs_may_come_in_any_order(self, processor: IOProcessor[Any, Any]) -> None:
        alone = self._answer(processor, "alone")

        async def answer() -> Any:
            parsed = parse(processor, self.good_data)
            prompts = as_prompts(await processor.pre_process_async(parsed, "r"))
            order = list(enumerate(prompts))[::-1]

            async def outputs() -> AsyncGenerator[tuple[int, PoolingRequestOutput[PoolingOutput]], None]:
                for index, prompt in order:
                    yield index, fake_output("r", prompt)

            return await processor.post_process_async(outputs(), "r")

        assert msgspec.json.encode(asyncio.run(answer())) == alone

    def test_forgets_a_request_that_failed(self, processor: IOProcessor[Any, Any]) -> None:
        before = self._answer(processor, "r")
        self._prompts(processor, "failed")
        processor.discard("failed")
        processor.discard("never seen")
        assert self._answer(processor, "failed") == before

    def _prompts(self, processor: IOProcessor[Any, Any], request_id: str) -> list[Prompt]:
        return as_prompts(processor.pre_process(parse(processor, self.good_data), request_id))

    def _answer(self, processor: IOProcessor[Any, Any], request_id: str) -> bytes:
        outputs = [fake_output(request_id, prompt) for prompt in self._prompts(processor, request_id)]
        made = processor.post_process(outputs, request_id)
        processor.discard(request_id)
        return msgspec.json.encode(made)
