"""States in torch against the recurrence, token by token; rows in pieces and together."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from pelton.attention.interface import AttentionNeeds
from pelton.attention.metadata import CommonMetadata
from pelton_backends.sdpa.state_space import CHUNK, StateSpaceBackend

H, P, N, G, TAPS, NUM_BLOCKS = 4, 8, 6, 2, 4, 8
INNER, WIDTH = H * P, H * P + 2 * G * N
NEEDS = AttentionNeeds(head_dim=P, num_heads=H, num_kv_heads=G, block_size=16, dtype="float32", attention_type="state")


def layer(*, has_bias: bool = True) -> Any:
    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(*shape)

    return SimpleNamespace(
        needs=NEEDS, num_heads=H, head_dim=P, num_groups=G, state_size=N, conv_weight=numbers(WIDTH, TAPS),
        conv_bias=numbers(WIDTH) if has_bias else None, dt_bias=numbers(H), a_log=numbers(H), d=numbers(H),
        dt_limit=(0.0, 3.0), conv_states=torch.full((NUM_BLOCKS, WIDTH, TAPS - 1), torch.nan),
        states=torch.full((NUM_BLOCKS, H, P, N), torch.nan),
    )  # fmt: skip


def recurrence(made: Any, rows: torch.Tensor) -> torch.Tensor:
    """[L, E + E + 2 G N + H] -> [L, E] in float64, one token after the other."""
    _, convolved, steps = rows.double().split([INNER, WIDTH, H], dim=-1)
    padded = F.pad(convolved.t(), (TAPS - 1, 0))
    bias = 0.0 if made.conv_bias is None else made.conv_bias.double()
    state, found = torch.zeros(H, P, N, dtype=torch.float64), []
    for t in range(len(rows)):
        mixed = F.silu((padded[:, t : t + TAPS] * made.conv_weight.double()).sum(-1) + bias)
        x, b, c = mixed.split([INNER, G * N, G * N])
        x = x.view(H, P)
        b, c = (part.view(G, N).repeat_interleave(H // G, dim=0) for part in (b, c))
        dt = F.softplus(steps[t] + made.dt_bias.double()).clamp(*made.dt_limit)
        state = (
            torch.exp(-dt * made.a_log.double().exp())[:, None, None] * state
            + (dt[:, None] * x)[..., None] * b[:, None]
        )
        found.append((state * c[:, None]).sum(-1) + made.d.double()[:, None] * x)
    return torch.stack(found).view(len(rows), INNER)


def step(
    bound: Any, backend: StateSpaceBackend, parts: list[torch.Tensor], seen: list[int], blocks: list[int]
) -> list[torch.Tensor]:
    """Rows of one step: their tokens, how many each has had before, and the blocks of their states."""
    lengths = [len(part) for part in parts]
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    total = int(starts[-1])
    common = CommonMetadata(
        query_start_loc=starts, seq_lens=torch.tensor([a + b for a, b in zip(seen, lengths, strict=True)], dtype=torch.int32),
        block_table=torch.tensor(blocks, dtype=torch.int32)[:, None], slot_mapping=torch.zeros(total, dtype=torch.int64),
        num_reqs=len(parts), num_tokens=total, num_actual_tokens=total, num_decode_rows=0, num_decode_tokens=0,
        max_query_len=max(lengths), max_seq_len=512,
    )  # fmt: skip
    output = torch.full((total, INNER), torch.nan)
    bound(torch.cat(parts), backend.build(common), output)
    return list(output.split(lengths))


def make_backend() -> StateSpaceBackend:
    return StateSpaceBackend(NEEDS, torch.device("cpu"), max_num_seqs=8, max_num_tokens=512, max_model_len=512)


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("cuts", [[1], [2, 1, 1], [CHUNK - 1, 1, 2], [CHUNK, CHUNK + 1], [3, 1, 1, 200, 1]])
def test_rows_in_pieces(cuts: list[int], has_bias: bool) -> None:
    """Two rows beside each other, whose blocks hold NaN of others at first."""
    torch.manual_seed(0)
    made, backend = layer(has_bias=has_bias), make_backend()
    bound = backend.bind(made)
    first, second = (torch.randn(sum(cuts), INNER + WIDTH + H) for _ in range(2))
    seen, found = 0, ([], [])
    for count in cuts:
        parts = [first[seen : seen + count], second[seen : seen + count]]
        for kept, output in zip(found, step(bound, backend, parts, [seen, seen], [5, 2]), strict=True):
            kept.append(output)
        seen += count
    for rows, outputs in zip((first, second), found, strict=True):
        torch.testing.assert_close(torch.cat(outputs).double(), recurrence(made, rows), rtol=2e-4, atol=2e-4)
    assert made.states[[0, 1, 3, 4, 6, 7]].isnan().all() and made.conv_states[[0, 1, 3, 4, 6, 7]].isnan().all()


def test_rows_of_all_kinds_in_one_step_and_one_that_begins_anew() -> None:
    torch.manual_seed(1)
    made, backend = layer(), make_backend()
    bound = backend.bind(made)
    one, two, three = (torch.randn(count, INNER + WIDTH + H) for count in (9, 5, 1))
    step(bound, backend, [one[:8]], [0], [1])
    mixed = step(bound, backend, [one[8:], two, three, two[:0]], [8, 0, 0, 0], [1, 2, 3, 0])
    for rows, output in zip((one, two, three), mixed, strict=False):
        torch.testing.assert_close(output.double(), recurrence(made, rows)[-len(output) :], rtol=2e-4, atol=2e-4)
    (again,) = step(bound, backend, [two], [0], [1])  # another request in the first one's block
    torch.testing.assert_close(again.double(), recurrence(made, two), rtol=2e-4, atol=2e-4)


def test_other_needs_are_refused() -> None:
    assert StateSpaceBackend.unsupported(NEEDS) == []
    decoder = AttentionNeeds(head_dim=8, num_heads=1, num_kv_heads=1, block_size=16, dtype="float64")
    reasons = StateSpaceBackend.unsupported(decoder)
    assert reasons[0] == "attention type decoder, only state" and reasons[1].startswith("dtype float64, only")
