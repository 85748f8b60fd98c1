"""Decode steps whose rows share a prefix, eager and as captured."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pelton.attention.metadata import BatchDescriptor
from pelton.testing.attention import AttentionCase, AttentionStep
from pelton_backends.triton import backend as backend_module
from pelton_backends.triton.attention.cascade import pays
from pelton_backends.triton.backend import TritonBackend
from pelton_backends.triton.runtime import INTERPRETED

DEVICE = "cpu" if INTERPRETED else "cuda"
PREFIX = 1024
CASE = AttentionCase(rows=tuple((1, PREFIX + 5 * row) for row in range(24)), num_heads=2, num_kv_heads=1, num_padding=2)
SHORT = replace(CASE, rows=tuple((1, 16 + row) for row in range(24)))


def shared_step(case: AttentionCase, prefix: int) -> AttentionStep:
    """Every row starts with row 0's blocks."""
    step = AttentionStep(TritonBackend, case, DEVICE)
    step.share_prefix(0, prefix)
    step.common.common_prefix_len = prefix
    step.common.common_prefix = torch.tensor([prefix], dtype=torch.int32, device=DEVICE)
    step.write()
    return step


@pytest.fixture
def cascades(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The prefix lengths that cascade attention was called with."""
    calls: list[object] = []
    real = backend_module.cascade_attention

    def spy(*args, prefix_len, **rest):
        calls.append(prefix_len)
        return real(*args, prefix_len=prefix_len, **rest)

    monkeypatch.setattr(backend_module, "cascade_attention", spy)
    return calls


@pytest.mark.parametrize("case, prefix", [(CASE, PREFIX), (SHORT, 16)], ids=["long", "short"])
def test_an_eager_step_reads_a_long_prefix_once(cascades: list[object], case: AttentionCase, prefix: int) -> None:
    step = shared_step(case, prefix)
    torch.testing.assert_close(step.run().double().cpu(), step.expected(), atol=2e-5, rtol=2e-5)
    assert cascades == ([PREFIX] if prefix == PREFIX else [])


@pytest.mark.parametrize("case, prefix", [(CASE, PREFIX), (SHORT, 16), (SHORT, 0)], ids=["long", "short", "none"])
def test_a_captured_step_reads_the_length_on_the_device(
    cascades: list[object], case: AttentionCase, prefix: int
) -> None:
    step = shared_step(case, prefix)
    key = BatchDescriptor(num_tokens=26, num_reqs=26, uniform_query_len=1, has_common_prefix=True)
    metadata = step.backend.build(step.common, key)
    output = torch.full_like(step.query, torch.nan)
    step.layer.attend(step.query, metadata, output)
    torch.testing.assert_close(output[:24].double().cpu(), step.expected(), atol=2e-5, rtol=2e-5)
    assert cascades == [step.common.common_prefix]


def test_a_window_has_no_use_for_it(cascades: list[object]) -> None:
    step = shared_step(replace(SHORT, sliding_window=10), 16)
    step.common.common_prefix_len = PREFIX
    torch.testing.assert_close(step.run().double().cpu(), step.expected(), atol=2e-5, rtol=2e-5)
    assert not cascades


@pytest.mark.parametrize(
    "rows, prefix, expected",
    [(64, 2048, True), (64, 0, False), (1, 8192, False), (8, 2048, False), (8, 8192, True), (256, 512, False)],
)
def test_pays_for_many_rows_behind_a_long_prefix(rows: int, prefix: int, expected: bool) -> None:
    step = AttentionStep(TritonBackend, AttentionCase(rows=((1, 3),)), DEVICE)
    assert pays(rows, prefix) is step.backend.uses_common_prefix(rows, prefix) is expected
