"""A mask that is late: its row samples when it is there, and the others go on meanwhile."""

from __future__ import annotations

import threading

import msgspec
import pytest

from pelton.config import EngineConfig
from pelton.engine.core import EngineCore
from pelton.plugins import load_plugins
from pelton.sampling_params import StructuredOutputsParams
from pelton.testing.fake_executor import FakeExecutor
from pelton.testing.fake_grammar import FakeGrammar, FakeGrammarBackend
from pelton.testing.fake_model import fake_resolved_model
from pelton.testing.scheduler import make_request

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
            self.may_end.wait(20)
        super().fill_bitmask(row, draft_token_ids)


class SlowBackend(FakeGrammarBackend):
    def compile(self, params):
        return SlowGrammar(int(params.regex), self.vocab_size, self.eos_token_ids)


class Offer:
    name, load, plugin = "slow", "", "the test"

    def resolve(self):
        return SlowBackend


@pytest.mark.parametrize("goes_past", [False, True], ids=["in-turn", "past-masks"])
@pytest.mark.parametrize("overlap", [1, 2, 3])
def test_a_late_row_samples_when_its_mask_is_there_and_others_go_on(overlap, goes_past, monkeypatch):
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
    assert not executor.violations
