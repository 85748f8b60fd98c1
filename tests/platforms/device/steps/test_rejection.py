"""Sampling with drafts keeps the law: the rule of worked example 5.9, and the engine's for drafts that are certain."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pelton.builtin import pelton_fused_ops
from pelton.messages.step import NewRequest
from pelton.ops.selector import OpSelector
from pelton.sampling.tails import FULL
from pelton.sampling_params import SamplingParams
from pelton.testing.plugins import references
from pelton_platforms.device.steps.batch_state import BatchState
from pelton_platforms.device.steps.rejection import rejection, residual, speculate
from pelton_platforms.device.steps.step_drafts import StepDrafts

CRITICAL = 18.47  # chi-square, 4 degrees of freedom, probability 0.001


def chi_square(counts: np.ndarray, law: np.ndarray) -> float:
    expected = counts.sum() * law
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("p, q, share", [(0.72, 0.65, 1.0), (0.45, 0.60, 0.75), (0.05, 0.50, 0.10)])
def test_a_draft_is_kept_with_the_share_of_the_worked_example(p: float, q: float, share: float) -> None:
    u = (np.arange(10_000) + 0.5) / 10_000
    kept = rejection(np.full(10_000, p), np.full(10_000, q), u)
    assert kept.mean() == pytest.approx(share, abs=1e-4)
    assert kept[: int(share * 10_000) - 1].all() and not kept[int(share * 10_000) + 1 :].any()


def test_what_replaces_a_draft_is_what_the_proposer_gave_too_little() -> None:
    assert residual(np.array([0.5, 0.3, 0.2]), np.array([0.1, 0.3, 0.6])) == pytest.approx([1.0, 0.0, 0.0])
    assert residual(np.array([0.5, 0.3, 0.2]), np.array([0.0, 0.0, 1.0])) == pytest.approx([0.625, 0.375, 0.0])


@pytest.mark.parametrize("is_certain", [False, True])
def test_the_first_token_of_a_step_has_the_model_s_law(is_certain: bool) -> None:
    generator = np.random.default_rng(5)
    p = generator.dirichlet(np.ones(5), size=3)
    q = np.eye(5)[[1, 4]] if is_certain else generator.dirichlet(np.ones(5), size=2)
    first, after = np.zeros(5), np.zeros((5, 5))
    for _ in range(20_000):
        drafts = np.array([generator.choice(5, p=law) for law in q])
        tokens = speculate(p, q, drafts, generator.random(2), generator.random())
        first[tokens[0]] += 1
        if len(tokens) > 1:
            after[tokens[0], tokens[1]] += 1
    assert chi_square(first, p[0]) < CRITICAL
    kept = after[first.argmax() if not is_certain else 1]
    assert kept.sum() > 500 and chi_square(kept, p[1]) < CRITICAL


def test_all_drafts_kept_bring_one_more_token() -> None:
    p = np.array([[1.0, 0.0], [0.0, 1.0], [0.5, 0.5]])
    assert speculate(p, p[:2], np.array([0, 1]), np.array([0.9, 0.9]), 0.75) == [0, 1, 1]


def test_verified_steps_sample_by_the_law() -> None:
    """Of 4,000 rows with a seed each and the same two drafts: each token given those before it, by temperature and top_k."""
    num_rows, vocab_size = 4_000, 6
    state = BatchState(
        max_num_seqs=num_rows, max_model_len=8, vocab_size=vocab_size, block_sizes=(4,), num_side_slots=0,
        device=torch.device("cpu"),
    )  # fmt: skip
    params = SamplingParams(temperature=0.8, top_k=5)
    state.add([
        NewRequest(request_id=str(slot), slot=slot, token_ids=[1, 2], num_prompt_tokens=2, num_computed_tokens=1,
                   sampling_params=params, block_ids=[[1]], seed=slot)
        for slot in range(num_rows)
    ])  # fmt: skip
    drafts = [3, 0]
    state.token_ids[:num_rows, 2:4] = torch.tensor(drafts, dtype=torch.int32)
    logits = torch.randn(3, vocab_size, generator=torch.Generator().manual_seed(1))
    logits[0, 3], logits[1, 0] = 1.5, 1.0  # often, not always
    laws = []
    for row in logits:
        kept = torch.where(row >= row.topk(5).values[-1], row / 0.8, -torch.inf)
        laws.append(kept.softmax(-1).double().numpy())
    result = torch.zeros(num_rows, 6, dtype=torch.int32)
    step = StepDrafts(OpSelector(references(), pelton_fused_ops()), state, 2, None)
    slots = torch.arange(num_rows)
    step.verify(FULL, logits.repeat(num_rows, 1), slots, torch.full((num_rows,), 2), result)
    rows = result.numpy()
    for place, law in enumerate(laws):
        tokens = rows[rows[:, 0] >= place][:, 3 + place]
        counts = np.bincount(tokens, minlength=vocab_size)
        assert len(tokens) > 300 and not counts[law == 0].any()
        assert chi_square(counts[law > 0], law[law > 0]) < CRITICAL
    assert state.num_computed_tokens[:num_rows].tolist() == (2 + rows[:, 0]).tolist()
