"""Steps on a GPU's worker: rows that ask for more than a token, with graphs and without; none waits for the device."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pelton_worker_fakes import Driver, Running, make_worker

from pelton.messages.step import GrammarMasks, ModelOutput
from pelton.testing.models import VOCAB_SIZE, make_tiny_checkpoint
from pelton.worker.pending import PendingOutput

pytestmark = pytest.mark.gpu

PROMPTS = [[7], [5, 80, 81], list(range(40, 60)), [11, 12] * 9, [3] * 20]
WANTED: list[dict[str, Any]] = [
    {}, {"temperature": 1.0, "top_p": 0.9}, {"logprobs": 3}, {"temperature": 1.2, "repetition_penalty": 1.3}, {},
]  # fmt: skip
WIDE = {
    "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 2, "head_dim": 128, "num_attention_heads": 8,
    "num_key_value_heads": 4, "max_position_embeddings": 8192,
}  # fmt: skip
"""Matrices that have kernels of their own for thousands of rows."""
NUM_STEPS, NUM_FIRST = 14, 4
"""All steps; those that may wait: they compile, load and capture."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_checkpoint(tmp_path_factory.mktemp("steps") / "llama", "llama", head_dim=64))


@pytest.fixture(autouse=True)
def own_stream() -> Iterator[None]:
    before = torch.cuda.current_stream()
    yield
    torch.cuda.set_sync_debug_mode("default")
    torch.cuda.set_stream(before)


@torch.inference_mode()
def outputs(checkpoint: str, mode: str, *, with_extras: bool, is_ahead: bool = False) -> list[list[int]]:
    """What each request got; some of the rows of some steps under a random half of the vocabulary. is_ahead: the device waits for the
    masks of steps that are captured."""
    worker = make_worker(checkpoint, device="cuda", dtype="float32", cudagraph_mode=mode)
    if not is_ahead:
        worker.runner._stream_wait = None
    num_ahead = 0
    driver, chooser, requests, others = Driver(worker.runner), random.Random(3), [], []
    for slot, (prompt, wanted) in enumerate(zip(PROMPTS, WANTED, strict=True)):
        side_slot = 0 if with_extras and "repetition_penalty" in wanted else -1
        params = wanted if with_extras else {}
        requests.append(driver.add(slot, prompt, seed=slot, side_slot=side_slot, **params))
    rows = sorted(((request, len(request.token_ids)) for request in requests), key=lambda row: row[1] != 1)
    step(driver, rows, None)
    for index in range(NUM_STEPS):
        is_masked = index % 2 == 0 if index < NUM_FIRST else chooser.random() < 0.5
        rows = [(request, 1) for request in requests]
        if index in (2, NUM_FIRST + 2):  # a prompt beside them, in the slot of the one before
            extras = {"side_slot": 1, "presence_penalty": 0.5, "min_tokens": 3} if with_extras else {}
            others.append(driver.add(5, [9, index] * 4, **extras))
            rows.append((others[-1], 8))
        allowed = np.array([[chooser.random() < 0.5 for _ in range(VOCAB_SIZE)] for _ in requests[1:4]])
        if index == NUM_FIRST:
            torch.cuda.set_sync_debug_mode("error")
        num_ahead += step(driver, rows, allowed if is_masked else None)
    assert (num_ahead >= 4) == (is_ahead and mode != "NONE"), (
        "most masked steps are launched before they have their masks"
    )
    torch.cuda.set_sync_debug_mode("default")
    assert not [error for request in requests for error in request.errors]
    if with_extras:
        columns = [result.logprobs[2].columns() for result in requests[2].results[1:]]
        assert all(len(column.token_ids[0]) == 4 for column in columns)
    worker.shutdown()
    return [request.output for request in [*requests, *others]]


def step(driver: Driver, rows: list[tuple[Running, int]], allowed: np.ndarray | None) -> bool:
    """allowed [3, V]: of rows 1 to 3. Returns whether the device waited for them."""
    masked = [] if allowed is None else [1, 2, 3]
    result = driver.runner.execute(driver.plan(rows, grammar_rows=masked))
    assert masked or result is not None
    is_ahead = result is not None and bool(masked)
    if allowed is not None:
        words = np.zeros((3, -(-VOCAB_SIZE // 32) * 32), dtype=bool)
        words[:, :VOCAB_SIZE] = allowed
        bitmask = np.packbits(words, axis=1, bitorder="little").tobytes()
        masks = GrammarMasks(step_id=driver.step_id - 1, bitmask=bitmask, num_masks=[1] * 3)
        if result is None:
            result = driver.runner.sample(masks)
        else:
            assert isinstance(result, PendingOutput) and not result.ready()
            driver.runner.bring_masks(masks)
    assert isinstance(result, PendingOutput)
    read: ModelOutput = result.result()
    driver.take(rows, None, read)
    if allowed is not None:
        assert all(allowed[row - 1, read.token_ids[row][0]] for row in masked)
    return is_ahead


@pytest.mark.parametrize("with_extras", [False, True], ids=["greedy", "extras"])
def test_masked_steps_give_the_same_in_every_graph_mode(checkpoint: str, with_extras: bool) -> None:
    """Reading a result waits, for an event; launching a step must not: its masks and columns travel from pinned memory."""
    expected = outputs(checkpoint, "NONE", with_extras=with_extras)
    assert [len(tokens) for tokens in expected] == [NUM_STEPS + 1] * 5 + [1] * 2
    for mode in ("FULL_AND_PIECEWISE", "FULL"):
        for is_ahead in (False, True):
            assert outputs(checkpoint, mode, with_extras=with_extras, is_ahead=is_ahead) == expected


@torch.inference_mode()
def logits_of(checkpoint: str, mode: str, steps: list[tuple[int, ...]]) -> tuple[list[torch.Tensor], Counter[str]]:
    """Of steps of prompts of these lengths, in bfloat16; and how many graphs they added."""
    worker = make_worker(
        checkpoint, device="cuda", dtype="bfloat16", cudagraph_mode=mode, num_blocks=1400, max_model_len=8192,
        max_num_batched_tokens=16_384,
    )  # fmt: skip
    driver, chooser, found = Driver(worker.runner), random.Random(5), []
    graphs, compute = worker.runner.graphs, worker.model.compute_logits

    def counted() -> Counter[str]:
        if graphs is None:
            return Counter()
        return Counter(pieces=len(graphs.pieces), prompts=sum(key.is_prompt for key in graphs.full._captured))

    def compute_logits(hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        logits = compute(hidden, rows)
        found.append(logits.float().clone())
        return logits

    worker.runner.model.compute_logits = compute_logits  # type: ignore[method-assign]
    before, held = counted(), torch.cuda.memory_reserved()
    for lengths in steps:
        prompts = [[chooser.randrange(10, VOCAB_SIZE) for _ in range(length)] for length in lengths]
        rows = [(driver.add(slot, prompt), len(prompt)) for slot, prompt in enumerate(prompts)]
        driver._next_block = 1
        result = driver.runner.execute(driver.plan(rows))
        assert isinstance(result, PendingOutput)
        driver.take(rows, None, result.result())
    added = counted() - before
    assert torch.cuda.memory_reserved() - held <= 2**25, "large steps compute in what was taken at the start"
    worker.shutdown()
    return found, added


@pytest.mark.parametrize(
    "mode, steps, added",
    [
        pytest.param(
            "PIECEWISE", [(2500, 4000, 150, 300), (4001, 2502, 250, 200), (1, 1, 6800, 151)], {"pieces": 1}, id="large"
        ),
        pytest.param(
            "FULL_AND_PIECEWISE", [(100,), (112,), (97,), (108,), (450,), (470,), (449,), (480,)],
            {"pieces": 2, "prompts": 2}, id="prompts-alone",
        ),
    ],
)  # fmt: skip
def test_replays_give_what_eager_steps_give(
    tmp_path: Path, mode: str, steps: list[tuple[int, ...]], added: dict[str, int]
) -> None:
    """The first steps of a size are captured, the others replayed, with other prompts, longer and shorter ones."""
    checkpoint = str(make_tiny_checkpoint(tmp_path / "wide", "llama", dtype="bfloat16", **WIDE))
    expected, _ = logits_of(checkpoint, "NONE", steps)
    found, graphs = logits_of(checkpoint, mode, steps)
    assert graphs == added
    assert [logits.shape for logits in found] == [(len(lengths), VOCAB_SIZE) for lengths in steps]
    errors = [((a - b).norm(dim=1) / b.norm(dim=1)).max() for a, b in zip(found, expected, strict=True)]
    print(f"largest relative errors in bfloat16, {mode}: {[f'{error:.1e}' for error in errors]}")
    assert max(errors) < 0.02, errors
