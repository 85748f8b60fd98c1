"""Conformance of logits processors: what any implementation has to keep, run with pytest.

Subclass `LogitsProcessorConformance` in a test module and say what is tested, and with what:

    class TestMine(LogitsProcessorConformance):
        processor_class = MyProcessor
        good_args = ({"word": 7},)
        bad_args = ({}, {"word": "seven"})
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec
import pytest
import torch
from torch import Tensor

from pelton.logits_processors.interface import LogitsProcessor, LogitsProcessorContext, LogitsRequest, LogitsRows
from pelton.sampling_params import SamplingParams

VOCAB_SIZE, NUM_SEQS, MAX_MODEL_LEN, NUM_PROMPT = 48, 6, 64, 5


@dataclass(frozen=True)
class Place:
    """A row: a request, by its number, and the position of its next token."""

    request: int
    position: int


class LogitsProcessorConformance:
    processor_class: ClassVar[type[LogitsProcessor]]
    good_args: ClassVar[Sequence[Any]]
    """Arguments that `check` takes: plain data."""
    bad_args: ClassVar[Sequence[Any]] = ()
    """Some that it refuses."""
    params: ClassVar[SamplingParams] = SamplingParams(max_tokens=32)
    vocab_size: ClassVar[int] = VOCAB_SIZE
    device: ClassVar[str] = "cpu"

    def make_processor(self, context: LogitsProcessorContext) -> LogitsProcessor:
        return self.processor_class(context)

    def test_takes_good_arguments_and_leaves_them_as_they_are(self) -> None:
        assert len(self.good_args), "set good_args"
        for args in self.good_args:
            msgspec.msgpack.encode(args)  # it has to cross to the engine's process
            given = copy.deepcopy(args)
            self.processor_class.check(given, self.params)
            assert given == args, f"check changes its argument: {args!r} became {given!r}"

    def test_refuses_bad_arguments(self) -> None:
        for args in self.bad_args:
            with pytest.raises((ValueError, TypeError)):  # a RequestError is a ValueError
                self.processor_class.check(args, self.params)
                raise AssertionError(f"check takes {args!r}, which is among bad_args")

    def test_gives_logits_of_the_same_form(self) -> None:
        batch = self._batch()
        for num_rows in (1, 3, len(batch.places)):
            found = batch.apply(batch.places[:num_rows])
            assert isinstance(found, Tensor) and found.shape == (num_rows, self.vocab_size), (
                f"apply returns {getattr(found, 'shape', found)}; expected [{num_rows}, {self.vocab_size}]"
            )
            assert found.dtype is torch.float32 and found.device.type == torch.device(self.device).type
            assert not found.isnan().any() and not found.isposinf().any(), "apply leaves NaN or infinity"

    def test_a_row_follows_from_its_request_alone(self) -> None:
        """Not from the rows beside it, their order, or how often it was asked: with drafts the same tokens come again."""
        batch = self._batch()
        together = batch.apply(batch.places)
        for row, place in enumerate(batch.places):
            alone = batch.apply([place])[0]
            assert torch.equal(alone, together[row]), f"{place} alone gives other logits than among others"
        order = list(reversed(range(len(batch.places))))
        backwards = batch.apply([batch.places[row] for row in order])
        assert torch.equal(backwards, together[order]), "the order of the rows changes their logits"
        assert torch.equal(batch.apply(batch.places), together), "a second call with the same rows gives other logits"

    def test_a_request_that_resumes_is_as_before(self) -> None:
        batch, later = self._batch(), self._batch()
        batch.apply(batch.places)
        last = [place for place in batch.places if place.position > NUM_PROMPT]
        assert torch.equal(later.apply(last), batch.apply(last)), (
            "a request that begins anew in the middle of its output gets other logits: state follows from more than argument and prompt"
        )

    def test_the_batch_is_left_as_it_is(self) -> None:
        batch = self._batch()
        before = batch.token_ids.clone()
        batch.apply(batch.places)
        assert torch.equal(batch.token_ids, before), "apply writes into batch_token_ids, which is the worker's own"

    def _batch(self) -> _Batch:
        context = LogitsProcessorContext(
            device=torch.device(self.device),
            vocab_size=self.vocab_size,
            max_num_seqs=NUM_SEQS,
            max_model_len=MAX_MODEL_LEN,
        )
        return _Batch(self.make_processor(context), self.good_args, self.params, self.vocab_size, self.device)


class _Batch:
    """Requests with texts that repeat themselves, and rows of them: at their first token, later, and with drafts."""

    def __init__(
        self, processor: LogitsProcessor, args: Sequence[Any], params: SamplingParams, vocab_size: int, device: str
    ) -> None:
        self.processor = processor
        generator = torch.Generator().manual_seed(5)
        tokens = torch.randint(0, min(vocab_size, 4), (NUM_SEQS + 1, MAX_MODEL_LEN + 1), generator=generator)
        self.token_ids = tokens.to(torch.int32).to(device)
        self.requests = [
            LogitsRequest(
                request_id=f"r{slot}",
                args=args[slot % len(args)],
                params=params,
                prompt_token_ids=tokens[slot, :NUM_PROMPT].tolist(),
                eos_token_ids=[1],
            )
            for slot in range(NUM_SEQS)
        ]
        for request in self.requests:
            processor.begin(request)
        self.places = [
            *(Place(0, NUM_PROMPT + draft) for draft in range(4)),
            Place(1, NUM_PROMPT),
            Place(2, NUM_PROMPT + 9),
            *(Place(3, NUM_PROMPT + 20 + draft) for draft in range(3)),
            Place(4, NUM_PROMPT + 1),
            Place(5, MAX_MODEL_LEN),
        ]
        self._logits = {
            place: torch.randn(vocab_size, generator=generator).to(device) for place in self.places
        }  # by place: what the model gives there

    def apply(self, places: Sequence[Place]) -> Tensor:
        device = self.token_ids.device
        rows = LogitsRows(
            requests=[self.requests[place.request] for place in places],
            positions=torch.tensor([place.position for place in places], device=device),
            slots=torch.tensor([place.request for place in places], device=device),
            batch_token_ids=self.token_ids,
        )
        return self.processor.apply(torch.stack([self._logits[place] for place in places]), rows)
