"""Kernels of sparse attention where steps are computed in parts, splits are merged and scores are what they seldom are."""

from __future__ import annotations

import pytest
import torch

from pelton.testing.sparse_attention import SparseCase, SparseStep
from pelton_backends.triton.attention import indexer, latent
from pelton_backends.triton.runtime import INTERPRETED
from pelton_backends.triton.sparse import TritonSparseBackend

DEVICE = "cpu" if INTERPRETED else "cuda"


def make_step(case: SparseCase) -> SparseStep:
    return SparseStep(TritonSparseBackend, case, DEVICE, "nan")


@pytest.mark.parametrize("tokens", [1, 4])
def test_scores_of_many_tokens_are_written_in_parts(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    step = make_step(SparseCase(rows=((1, 40), (1, 3), (7, 20)), num_padding=2))
    monkeypatch.setattr(indexer, "SCORES", tokens * step.index_common.max_seq_len)
    assert step.choose() == step.expected_choice()
    assert (step.chosen[step.num_tokens :] == -7).all(), "padding is left alone"


@pytest.mark.parametrize("has_sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize("splits", [3, 8])
def test_parts_of_a_choice_are_merged(splits: int, has_sinks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latent, "num_splits", lambda *_: splits)
    step = make_step(SparseCase(rows=((1, 0), (1, 16), (1, 200)), top_k=100, has_sinks=has_sinks))
    chosen = step.choose()
    torch.testing.assert_close(step.attend().double().cpu(), step.expected(chosen), atol=2e-5, rtol=2e-5)


def test_scores_of_every_size_and_sign_are_in_order() -> None:
    """The order of bits is that of numbers: one head, whose query leaves the key's first number, and a weight of either sign."""
    case = SparseCase(rows=((1, 63), (1, 63)), top_k=9, index_heads=1, index_dim=16)
    step = make_step(case)
    generator = torch.Generator().manual_seed(1)
    sizes = 10.0 ** torch.randint(-30, 30, (64,), generator=generator) * torch.rand(64, generator=generator)
    step.index_query.zero_()[:, 0, 0] = 1.0
    step.indexer.weights[:] = torch.tensor([[1.0], [-1.0]])
    for table in step.index_common.block_table.tolist():
        for token in range(64):
            step.index_cache[table[token // 16], token % 16] = 0.0
            step.index_cache[table[token // 16], token % 16, 0] = sizes[token] * (-1.0 if token % 7 == 0 else 1.0)
    kept = torch.where(torch.arange(64) % 7 == 0, 0.0, sizes)
    largest = sorted(kept.sort(descending=True, stable=True).indices[:9].tolist())
    smallest = sorted(kept.sort(stable=True).indices[:9].tolist())
    assert step.choose() == [largest, smallest]
