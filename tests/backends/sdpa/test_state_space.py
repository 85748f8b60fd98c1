"""States in torch against the recurrence, token by token; rows in pieces and together."""

from __future__ import annotations

import pytest
import torch
from pelton_states import StateCase, check, make_backend, make_layer, recurrence, run_step

from pelton.attention.interface import AttentionNeeds
from pelton_backends.sdpa.state_space import CHUNK, StateSpaceBackend


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("cuts", [[1], [2, 1, 1], [CHUNK - 1, 1, 2], [CHUNK, CHUNK + 1], [3, 1, 1, 200, 1]])
def test_rows_in_pieces(cuts: list[int], has_bias: bool) -> None:
    """Two rows beside each other, whose blocks hold NaN of others at first."""
    torch.manual_seed(0)
    case = StateCase(has_bias=has_bias)
    made, backend = make_layer(case), make_backend(StateSpaceBackend, case)
    bound = backend.bind(made)
    first, second = (case.rows(sum(cuts)) for _ in range(2))
    seen, found = 0, ([], [])
    for count in cuts:
        parts = [first[seen : seen + count], second[seen : seen + count]]
        for kept, output in zip(found, run_step(bound, backend, parts, [seen, seen], [5, 2]), strict=True):
            kept.append(output)
        seen += count
    for rows, outputs in zip((first, second), found, strict=True):
        check(torch.cat(outputs), recurrence(made, rows), "float32")
    assert made.states[[0, 1, 3, 4, 6, 7]].isnan().all() and made.conv_states[[0, 1, 3, 4, 6, 7]].isnan().all()


def test_rows_of_all_kinds_in_one_step_and_one_that_begins_anew() -> None:
    torch.manual_seed(1)
    case = StateCase()
    made, backend = make_layer(case), make_backend(StateSpaceBackend, case)
    bound = backend.bind(made)
    one, two, three = (case.rows(count) for count in (9, 5, 1))
    run_step(bound, backend, [one[:8]], [0], [1])
    mixed = run_step(bound, backend, [one[8:], two, three, two[:0]], [8, 0, 0, 0], [1, 2, 3, 0])
    for rows, output in zip((one, two, three), mixed, strict=False):
        check(output, recurrence(made, rows)[-len(output) :], "float32")
    (again,) = run_step(bound, backend, [two], [0], [1])  # another request in the first one's block
    check(again, recurrence(made, two), "float32")


def test_other_needs_are_refused() -> None:
    assert StateSpaceBackend.unsupported(StateCase().needs) == []
    decoder = AttentionNeeds(head_dim=8, num_heads=1, num_kv_heads=1, block_size=16, dtype="float64")
    reasons = StateSpaceBackend.unsupported(decoder)
    assert reasons[0] == "attention type decoder, only state" and reasons[1].startswith("dtype float64, only")
