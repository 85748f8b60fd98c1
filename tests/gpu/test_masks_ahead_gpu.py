"""Steps that the device holds up until their masks come: nothing may leave it waiting."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from pelton.config import EngineConfig
from pelton.engine.core import EngineCore
from pelton.messages.step import GrammarMasks
from pelton.model.resolve import resolve_model
from pelton.plugins import load_plugins
from pelton.sampling_params import StructuredOutputsParams
from pelton.structured.interface import Grammar
from pelton.testing.fake_grammar import FakeGrammar, FakeGrammarBackend
from pelton.testing.models import make_tiny_checkpoint
from pelton.testing.scheduler import make_request

pytestmark = pytest.mark.gpu
NUM_TOKENS = 40


class Breaking(FakeGrammar):
    """Its mask behind the twentieth token cannot be made."""

    def fill_bitmask(self, row: bytearray | memoryview, draft_token_ids: Any = ()) -> None:
        if self.position >= 20:
            raise ValueError("no mask for this")
        super().fill_bitmask(row, draft_token_ids)


class Backend(FakeGrammarBackend):
    def compile(self, params: StructuredOutputsParams) -> Grammar:
        made = super().compile(params)
        assert isinstance(made, FakeGrammar)
        return Breaking(30, self.vocab_size, self.eos_token_ids) if made.length == 30 else made


class Offer:
    name, load, plugin = "fake", "", "the test"

    def resolve(self) -> type[Backend]:
        return Backend


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("ahead") / "llama", "llama", head_dim=64)


@pytest.fixture
def make_core(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], EngineCore]]:
    plugins, hook = load_plugins(only=[]), "pelton_structured_output_backends"
    entries = type(plugins).entries
    monkeypatch.setattr(
        type(plugins), "entries", lambda self, name, **a: [Offer()] if name == hook else entries(self, name, **a)
    )
    made: list[EngineCore] = []

    def make() -> EngineCore:
        config = EngineConfig.from_flat(
            model=str(checkpoint), device="cuda", max_num_seqs=6, max_model_len=96, num_gpu_blocks_override=120
        )
        model = msgspec.structs.replace(resolve_model(config, plugins), tokenizer_path="fake")
        made.append(EngineCore(config, model, plugins))
        return made[-1]

    yield make
    for core in made:
        core.shutdown()


def add(core: EngineCore, name: str, length: int) -> None:
    constraint = StructuredOutputsParams(regex=str(length))
    core.add_request(
        make_request(name, 5, NUM_TOKENS, eos_token_ids=[2], ignore_eos=False, structured_outputs=constraint)
    )


def run(core: EngineCore) -> dict[str, tuple[list[int], str | None]]:
    """Tokens and error of each request."""
    found: dict[str, tuple[list[int], str | None]] = {}
    end = time.monotonic() + 30
    while core.has_work():
        assert time.monotonic() < end, "the device waits for masks that nobody brings"
        for output in core.step(0.1).outputs:
            tokens, error = found.get(output.request_id, ([], None))
            found[output.request_id] = (tokens + output.new_token_ids, output.error.message if output.error else error)
    return found


def is_soon(happens: Callable[[], bool]) -> bool:
    """The worker's thread launches a step a moment after it was asked to."""
    end = time.monotonic() + 5
    while not happens() and time.monotonic() < end:
        time.sleep(0.001)
    return happens()


def worker_of(core: EngineCore) -> Any:
    return core._executor._worker  # type: ignore[attr-defined]


def test_masks_are_waited_for_on_the_device_and_give_the_same(make_core: Callable[[], EngineCore]) -> None:
    def tokens(*, is_ahead: bool) -> tuple[dict[str, Any], int]:
        core, opened = make_core(), 0
        if not is_ahead:
            worker_of(core).runner._stream_wait = None
        for _ in range(2):  # the first is captured on its way
            for index, length in enumerate((25, 33, 37)):
                add(core, f"r{index}", length)
            found = run(core)
            ahead = worker_of(core).runner._masks_ahead
            opened = 0 if ahead is None else sum(part.num_uses for part in ahead._parts)
        core.shutdown()
        return found, opened

    expected, none = tokens(is_ahead=False)
    found, opened = tokens(is_ahead=True)
    assert none == 0 and opened > 40, "most steps were launched ahead"
    assert found == expected
    assert all(error is None for _, error in found.values())
    for name, length in (("r0", 25), ("r1", 33), ("r2", 37)):
        values = [token for token in found[name][0] if token != 2]
        assert len(values) == length and all(token % 3 != place % 3 for place, token in enumerate(values))


def test_a_grammar_that_fails_ends_alone_and_the_device_goes_on(make_core: Callable[[], EngineCore]) -> None:
    core = make_core()
    for _ in range(2):
        for name, length in (("good", 37), ("bad", 30), ("other", 33)):
            add(core, name, length)
        found = run(core)
        assert "no mask for this" in str(found["bad"][1]) and len(found["bad"][0]) == 20
        assert len(found["good"][0]) == 38 and len(found["other"][0]) == 34


def test_masks_that_cannot_be_made_at_all_fail_their_step(
    make_core: Callable[[], EngineCore], monkeypatch: pytest.MonkeyPatch
) -> None:
    core = make_core()
    add(core, "first", 37)
    run(core)
    make_masks, count = core._scheduler.grammar_masks, 0

    def broken(output: Any, room: Any) -> GrammarMasks | None:
        nonlocal count
        count += 1
        if count == 10:
            raise ZeroDivisionError("masks")
        return make_masks(output, room)

    monkeypatch.setattr(core._scheduler, "grammar_masks", broken)
    add(core, "second", 37)
    assert "ZeroDivisionError" in str(run(core)["second"][1])
    add(core, "third", 37)
    assert len(run(core)["third"][0]) == 38


def test_shutdown_and_calls_do_not_wait_for_masks_that_will_not_come(make_core: Callable[[], EngineCore]) -> None:
    core = make_core()
    add(core, "first", 37)
    run(core)
    add(core, "second", 37)
    for _ in range(6):
        core.step(1.0)
    worker = worker_of(core)
    assert is_soon(lambda: worker.runner.awaits_masks), "the newest step waits for masks on the device"
    core._executor.check_device()  # no synchronisation here
    assert core.call("worker.prepare_ahead") in (True, False)
    for _ in range(4):
        core.step(1.0)
    assert is_soon(lambda: worker.runner.awaits_masks)
    closing = threading.Thread(target=core.shutdown)
    closing.start()
    closing.join(20)
    assert not closing.is_alive()
    torch.cuda.synchronize()
