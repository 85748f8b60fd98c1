"""The garbage collector of a serving process: tuned while there is an engine, and with nothing to collect."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from pelton.config import EngineConfig
from pelton.engine.input_processor import ProcessedRequest
from pelton.engine.output_processor import OutputProcessor
from pelton.engine.output_queue import OutputQueue
from pelton.errors import EngineDeadError
from pelton.messages.outputs import EngineOutput, EngineOutputs, FinishReason
from pelton.messages.request import EngineRequest
from pelton.sampling_params import SamplingParams
from pelton.utils import garbage


@pytest.fixture(autouse=True)
def as_found() -> Iterator[None]:
    """The collector as it was."""
    thresholds, enabled = gc.get_threshold(), gc.isenabled()
    yield
    gc.set_threshold(*thresholds)
    (gc.enable if enabled else gc.disable)()
    gc.freeze()


@pytest.fixture
def owners(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Python's own collector, whatever other tests have in its place, and no owner."""
    owners: set[int] = set()
    monkeypatch.setattr(garbage, "gc", gc)
    monkeypatch.setattr(garbage, "_owners", owners)
    return owners


def test_thresholds_are_raised_while_an_engine_lives_and_come_back(owners: set[int]) -> None:
    gc.set_threshold(700, 10, 200)
    engine, front_end = object(), object()
    garbage.tune(engine)
    garbage.tune(front_end)
    assert gc.get_threshold() == (700, 1000, 200)
    assert gc.get_freeze_count() > 0
    garbage.untune(engine)
    garbage.untune(engine)  # ended twice
    assert gc.get_threshold() == (700, 1000, 200)
    garbage.untune(front_end)
    assert gc.get_threshold() == (700, 10, 200)
    assert gc.get_freeze_count() == 0


def test_a_collector_that_is_off_stays_off(owners: set[int]) -> None:
    gc.set_threshold(0, 10, 10)
    garbage.tune(owners)
    assert gc.get_threshold() == (0, 10, 10)


def test_what_was_never_tuned_may_end(owners: set[int]) -> None:
    gc.set_threshold(700, 10, 10)
    garbage.untune(object())
    assert gc.get_threshold() == (700, 10, 10)


@pytest.mark.parametrize("ends", ["finished", "aborted", "failed", "engine died"])
def test_a_request_that_ended_is_freed_at_once(ends: str) -> None:
    """Not by the collector, which would stand in the way of other requests."""
    processor = OutputProcessor(None, EngineConfig())
    params = SamplingParams(n=2)
    requests = [EngineRequest(request_id=f"r_{i}", prompt_token_ids=[5], sampling_params=params) for i in range(2)]
    queue = OutputQueue()
    is_freed = weakref.ref(queue)
    gc.disable()
    processor.add(ProcessedRequest("r", None, [5], params, requests), arrival=0.0, queue=queue)
    processor.process(EngineOutputs([EngineOutput("r_0", [7]), EngineOutput("r_1", [7])], 1.0), 1.0)
    if ends == "aborted":
        processor.abort(["r"])
    elif ends == "failed":
        processor.process(EngineOutputs([EngineOutput("r_1", [], FinishReason.ERROR)], 2.0), 2.0)
    elif ends == "engine died":
        processor.fail_all(EngineDeadError("The engine died."))
    else:
        for index in range(2):
            processor.process(EngineOutputs([EngineOutput(f"r_{index}", [8], FinishReason.LENGTH)], 2.0), 2.0)
    assert processor.num_unfinished == 0
    del queue
    assert is_freed() is None


def test_the_collector_rests_during_a_start(owners: set[int]) -> None:
    gc.enable()
    with pytest.raises(ValueError, match="no model"), garbage.paused():
        assert not gc.isenabled()
        raise ValueError("no model")
    assert gc.isenabled()
    gc.disable()
    with garbage.paused():
        pass
    assert not gc.isenabled()  # someone has switched it off
