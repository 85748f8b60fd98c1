"""A mask that is late: its row samples when it is there, and the others go on meanwhile."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError

import msgspec
import numpy as np
import pytest

from pelton.config import EngineConfig
from pelton.engine.core import EngineCore
from pelton.plugins import load_plugins
from pelton.sampling_params import StructuredOutputsParams
from pelton.testing.fake_executor import FakeExecutor
from pelton.testing.fake_grammar import FakeGrammar, FakeGrammarBackend
from pelton.testing.fake_model import fake_resolved_model
from pelton.testing.scheduler import make_request
from pelton_plugins.scheduler import grammars

MADE: list[SlowGrammar] = []


class SlowGrammar(FakeGrammar):
    """Its mask behind the second token takes as long as the test says."""

    is_slow = True

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.may_end, self.num_late = threading.Event(), 0
        MADE.append(self)

    def fill_bitmask(self, row, draft_token_ids=()) -> None:
        if self.position + len(draft_token_ids) == 2 and not self.may_end.is_set():
            self.num_late += 1
            self.may_end.wait(90)
        super().fill_bitmask(row, draft_token_ids)


class Filler:
    """Makes masks on a thread each, and goes on without those that take long."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(4)

    def fill(self, rows, bitmask):
        late = {}
        for index, (grammar, place, drafts) in enumerate(rows):
            job = self._threads.submit(self._masks, grammar, list(drafts), bitmask.shape[1])
            try:
                bitmask[place : place + 1 + len(drafts)] = job.result(0.05)
            except FutureTimeoutError:
                late[index] = job
        return late

    @staticmethod
    def _masks(grammar, drafts, num_words):
        masks = np.full((1 + len(drafts), num_words), -1, dtype="<i4")
        for count in range(1 + len(drafts)):
            grammar.fill_bitmask(masks[count].data.cast("B"), drafts[:count])
        return masks


class Surprise(SlowGrammar):
    """Nobody knows that it is slow."""

    is_slow, filler = False, Filler()


class SlowBackend(FakeGrammarBackend):
    kind = SlowGrammar

    def compile(self, params):
        return self.kind(int(params.regex), self.vocab_size, self.eos_token_ids)


class Offer:
    name, load, plugin = "slow", "", "the test"

    def resolve(self):
        return SlowBackend


@pytest.mark.parametrize("kind", [SlowGrammar, Surprise], ids=["known-to-be-slow", "not-known"])
@pytest.mark.parametrize("goes_past", [False, True], ids=["in-turn", "past-masks"])
@pytest.mark.parametrize("overlap", [1, 2, 3])
def test_a_late_row_samples_when_its_mask_is_there_and_others_go_on(overlap, goes_past, kind, monkeypatch):
    monkeypatch.setattr(SlowBackend, "kind", kind)
    plugins, hook = load_plugins(), "pelton_structured_output_backends"
    entries = type(plugins).entries
    monkeypatch.setattr(
        type(plugins), "entries", lambda self, name, **a: [Offer()] if name == hook else entries(self, name, **a)
    )
    config = EngineConfig.from_flat(
        max_num_seqs=4, max_num_batched_tokens=32, num_gpu_blocks_override=50, max_steps_in_flight=overlap
    )
    model = msgspec.structs.replace(fake_resolved_model(max_model_len=128), tokenizer_path="fake")
    executor = FakeExecutor(config, model)
    executor.launches_past_masks = goes_past
    core = EngineCore(config, model, plugins, executor=executor)
    constraint = StructuredOutputsParams(regex="5")
    late = make_request("late", 3, 20, eos_token_ids=[0], structured_outputs=constraint)
    plain = make_request("plain", 4, 60)
    MADE.clear()
    core.add_request(late)
    core.add_request(plain)
    found: dict[str, list[int]] = {"late": [], "plain": []}
    ahead = 0
    for _ in range(5000):
        if not core.has_unfinished_requests():
            break
        for output in core.step(0.01).outputs:
            assert output.error is None
            found[output.request_id] += output.new_token_ids
        if MADE and MADE[0].num_late and len(found["plain"]) >= 40 and not MADE[0].may_end.is_set():
            ahead = len(found["plain"])
            assert len(found["late"]) == 2, "it sampled without its mask"
            MADE[0].may_end.set()
    core.shutdown()
    assert ahead >= 40, "the others waited for it"
    grammar = FakeGrammar(5, 50, (0,))
    assert found["late"] == executor.fake_model.generate(late, max_model_len=128, grammar=grammar)[0]
    assert found["plain"] == executor.fake_model.generate(plain, max_model_len=128)[0]
    assert MADE[0].num_late == 1, "its mask was made once"
    assert not executor.violations


def test_a_grammar_without_a_filler_is_slow_from_its_first_slow_mask_on(monkeypatch):
    """Its masks are made on the engine's thread, where nobody can go on without one."""
    times = iter([0.0, 0.001, 0.01, 1.0])
    monkeypatch.setattr(grammars.time, "thread_time", lambda: next(times))
    grammar = FakeGrammar(5, 50, (0,))
    grammar.filler = None
    bitmask, request = np.zeros((1, 2), dtype="<i4"), object()
    for is_slow in (False, True):
        grammars._fill(None, [(grammar, 0, (), request)], [(grammar, 0, ())], bitmask, None)
        assert grammar.is_slow == is_slow
