"""States of all kinds but Mamba-2's in torch, against their recurrences written out, token by token in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pelton.attention.interface import AttentionNeeds
from pelton.attention.metadata import CommonMetadata
from pelton_backends.sdpa.delta_rule import CHUNK, KEY_CHUNK, DeltaRuleBackend, KeyDeltaRuleBackend
from pelton_backends.sdpa.lightning import LightningBackend
from pelton_backends.sdpa.rg_lru import RgLruBackend
from pelton_backends.sdpa.selective_scan import SelectiveScanBackend
from pelton_backends.sdpa.short_conv import ShortConvBackend
from pelton_backends.sdpa.state_rows import StateRows

NUM_BLOCKS, TAPS = 8, 4
H, G, D, P = 4, 2, 6, 8
"""Of the delta rule: heads of values and of keys, numbers of a key and of a value."""
E, N, RANK = 10, 5, 3
"""Of the scan and of the convolution: numbers of a token, of its state, and those that make its steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    backend: type[StateRows]
    columns: int  # of the query, with some behind them that are not read
    inner: int
    make: Callable[[], Any]
    recurrence: Callable[[Any, Tensor], Tensor]


def pool(*shape: int) -> Tensor:
    """States, full of what others left."""
    return torch.full((NUM_BLOCKS, *shape), torch.nan)


def convolved(layer: Any, x: Tensor) -> Tensor:
    """[L, W] -> [L, W] float64"""
    padded = F.pad(x.double(), (0, 0, TAPS - 1, 0))
    bias = 0.0 if layer.conv_bias is None else layer.conv_bias.double()
    weight = layer.conv_weight.double()
    return torch.stack([(padded[t : t + TAPS].t() * weight).sum(-1) + bias for t in range(len(x))])


def delta_layer(*, size: int = 1, is_slow: bool = False) -> Any:
    """size: numbers of a head's decay; is_slow: states forget little."""
    width = 2 * G * D + H * P
    steps = torch.full((H * size,), -3.0) if is_slow else 9 * torch.randn(H * size)
    return SimpleNamespace(
        num_heads=H, head_dim=P, num_groups=G, state_size=D, max_beta=2.0, conv_weight=torch.randn(width, TAPS), conv_bias=None,
        dt_bias=steps, a_log=torch.randn(H), conv_states=pool(width, TAPS - 1), states=pool(H, D, P),
    )  # fmt: skip


def delta_recurrence(layer: Any, rows: Tensor) -> Tensor:
    mixed, b, a, _ = rows.double().split([2 * G * D + H * P, H, len(layer.dt_bias), 7], dim=-1)
    q, k, v = F.silu(convolved(layer, mixed)).split([G * D, G * D, H * P], dim=-1)
    state, found = torch.zeros(H, D, P, dtype=torch.float64), []
    for t in range(len(rows)):
        q_t, k_t = (
            (part[t].view(G, D) / (part[t].view(G, D).square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(H // G, 0)
            for part in (q, k)
        )  # fmt: skip
        steps = F.softplus(a[t] + layer.dt_bias).view(H, -1)
        state = state * torch.exp(-layer.a_log.double().exp()[:, None] * steps)[..., None]
        known = torch.einsum("hdp,hd->hp", state, k_t)
        new = 2.0 * torch.sigmoid(b[t])[:, None] * (v[t].view(H, P) - known)
        state = state + torch.einsum("hd,hp->hdp", k_t, new)
        found.append(torch.einsum("hdp,hd->hp", state, q_t) / D**0.5)
    return torch.stack(found).flatten(1)


def scan_layer() -> Any:
    made = SimpleNamespace(
        conv_weight=torch.randn(E, TAPS), conv_bias=torch.randn(E), a_log=torch.randn(E, N), d=torch.randn(E),
        x_proj=torch.randn(RANK + 2 * N, E), dt_proj=torch.randn(E, RANK), conv_states=pool(E, TAPS - 1), states=pool(E, N),
    )  # fmt: skip

    def selected(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        dt, b, c = (x @ made.x_proj.t().to(x.dtype)).split([RANK, N, N], dim=-1)
        return F.softplus(dt @ made.dt_proj.t().to(x.dtype)), b, c

    made.selected = selected
    return made


def scan_recurrence(layer: Any, rows: Tensor) -> Tensor:
    x = F.silu(convolved(layer, rows[:, :E]))
    dt, b, c = layer.selected(x)
    state, found = torch.zeros(E, N, dtype=torch.float64), []
    for t in range(len(rows)):
        state = torch.exp(-dt[t, :, None] * layer.a_log.double().exp()) * state + (dt[t] * x[t])[:, None] * b[t]
        found.append(state @ c[t] + layer.d * x[t])
    return torch.stack(found)


def conv_layer() -> Any:
    return SimpleNamespace(conv_weight=torch.randn(E, TAPS), conv_bias=torch.randn(E), conv_states=pool(E, TAPS - 1))


def conv_recurrence(layer: Any, rows: Tensor) -> Tensor:
    before, behind, x = rows.double().chunk(3, dim=-1)
    return behind * convolved(layer, before * x)


def unit_layer() -> Any:
    made = SimpleNamespace(
        conv_weight=torch.randn(E, TAPS), conv_bias=torch.randn(E), conv_states=pool(E, TAPS - 1), states=pool(E),
    )  # fmt: skip
    made.gated = lambda x: (-torch.sigmoid(x) * torch.linspace(0.01, 5.0, E), torch.tanh(x))
    return made


def unit_recurrence(layer: Any, rows: Tensor) -> Tensor:
    decay, given = layer.gated(convolved(layer, rows[:, :E]))
    found = [given[0]]
    for t in range(1, len(rows)):
        found.append(torch.exp(decay[t]) * found[-1] + (1 - torch.exp(2 * decay[t])).sqrt() * given[t])
    return torch.stack(found)


def lightning_layer() -> Any:
    return SimpleNamespace(num_heads=H, head_dim=P, slopes=torch.rand(H), states=pool(H, P, P))


def lightning_recurrence(layer: Any, rows: Tensor) -> Tensor:
    q, k, v = (part.unflatten(-1, (H, P)) for part in F.silu(rows[:, : 3 * H * P].double()).split(H * P, dim=-1))
    state, found = torch.zeros(H, P, P, dtype=torch.float64), []
    for t in range(len(rows)):
        state = torch.exp(-layer.slopes.double())[:, None, None] * state + k[t][..., None] * v[t][:, None]
        found.append((q[t][:, None] @ state)[:, 0])
    return torch.stack(found).flatten(1)


KINDS = {
    "delta_rule": Kind(
        backend=DeltaRuleBackend, columns=2 * G * D + H * P + 2 * H + 7, inner=H * P, make=delta_layer,
        recurrence=delta_recurrence,
    ),
    "key_delta_rule": Kind(
        backend=KeyDeltaRuleBackend, columns=2 * G * D + H * P + H + H * D + 7, inner=H * P, make=partial(delta_layer, size=D),
        recurrence=delta_recurrence,
    ),
    "key_delta_rule-slow": Kind(
        backend=KeyDeltaRuleBackend, columns=2 * G * D + H * P + H + H * D + 7, inner=H * P,
        make=partial(delta_layer, size=D, is_slow=True), recurrence=delta_recurrence,
    ),
    "selective_scan": Kind(
        backend=SelectiveScanBackend, columns=2 * E, inner=E, make=scan_layer, recurrence=scan_recurrence
    ),
    "lightning": Kind(
        backend=LightningBackend, columns=4 * H * P, inner=H * P, make=lightning_layer, recurrence=lightning_recurrence
    ),
    "rg_lru": Kind(backend=RgLruBackend, columns=2 * E, inner=E, make=unit_layer, recurrence=unit_recurrence),
    "short_conv": Kind(backend=ShortConvBackend, columns=3 * E, inner=E, make=conv_layer, recurrence=conv_recurrence),
}  # fmt: skip


def needs_of(kind: str, dtype: str = "float32") -> AttentionNeeds:
    return AttentionNeeds(
        head_dim=P, num_heads=H, num_kv_heads=G, block_size=16, dtype=dtype, attention_type=kind.partition("-")[0]
    )


@pytest.fixture(params=KINDS)
def run(request: pytest.FixtureRequest) -> Any:
    """A layer of each kind, its rows, its recurrence, and what computes a step: lists of each row's tokens, of how many it has had, and of
    blocks."""
    torch.manual_seed(0)
    kind = KINDS[request.param]
    layer = kind.make()
    backend = kind.backend(
        needs_of(request.param), torch.device("cpu"), max_num_seqs=8, max_num_tokens=512, max_model_len=512
    )
    bound = backend.bind(layer)

    def step(parts: list[Tensor], seen: list[int], blocks: list[int], num_padding: int = 0) -> list[Tensor]:
        lengths = [len(part) for part in parts]
        total = sum(lengths)
        common = CommonMetadata(
            query_start_loc=torch.tensor([0, *accumulate(lengths)], dtype=torch.int32),
            seq_lens=torch.tensor([a + b for a, b in zip(seen, lengths, strict=True)], dtype=torch.int32),
            block_table=torch.tensor(blocks, dtype=torch.int32)[:, None], slot_mapping=torch.zeros(total, dtype=torch.int64),
            num_reqs=len(parts), num_tokens=total + num_padding, num_actual_tokens=total, num_decode_rows=0,
            num_decode_tokens=0, max_query_len=max(lengths), max_seq_len=512,
        )  # fmt: skip
        output = torch.zeros(total + num_padding, kind.inner)
        padding = torch.full((num_padding, kind.columns), 1e4)
        bound(torch.cat([*parts, padding]), backend.build(common), output)
        return list(output[:total].split(lengths))

    def rows(count: int) -> Tensor:
        return torch.randn(count, kind.columns)

    return SimpleNamespace(layer=layer, step=step, rows=rows, recurrence=lambda rows: kind.recurrence(layer, rows))


def check(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.double(), expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize(
    "cuts", [[1], [2, 1, 1], [KEY_CHUNK + 1, 1], [CHUNK - 1, 1, 2], [CHUNK, CHUNK + 1], [3, 1, 1, 200, 1]]
)
def test_rows_in_pieces(run: Any, cuts: list[int]) -> None:
    """Two rows beside each other, whose blocks hold NaN of others at first."""
    first, second = run.rows(sum(cuts)), run.rows(sum(cuts))
    seen, found = 0, ([], [])
    for count in cuts:
        parts = [first[seen : seen + count], second[seen : seen + count]]
        for kept, output in zip(found, run.step(parts, [seen, seen], [5, 2]), strict=True):
            kept.append(output)
        seen += count
    for rows, outputs in zip((first, second), found, strict=True):
        check(torch.cat(outputs), run.recurrence(rows))
    for name in ("conv_states", "states"):
        if hasattr(run.layer, name):
            assert getattr(run.layer, name)[[0, 1, 3, 4, 6, 7]].isnan().all()


def test_rows_of_all_kinds_in_one_step_and_one_that_begins_anew(run: Any) -> None:
    one, two, three = run.rows(9), run.rows(5), run.rows(1)
    run.step([one[:8]], [0], [1])
    mixed = run.step([one[8:], two, three, two[:0]], [8, 0, 0, 0], [1, 2, 3, 0], num_padding=3)
    for rows, output in zip((one, two, three), mixed, strict=False):
        check(output, run.recurrence(rows)[-len(output) :])
    (again,) = run.step([two], [0], [1])  # another request in the first one's block
    check(again, run.recurrence(two))


@pytest.mark.parametrize("kind", KINDS)
def test_other_needs_are_refused(kind: str) -> None:
    backend = KINDS[kind].backend
    assert backend.unsupported(needs_of(kind)) == []
    reasons = backend.unsupported(needs_of("state", "float64"))
    assert reasons[0] == f"attention type state, only {kind.partition('-')[0]}" and reasons[1].startswith(
        "dtype float64, only"
    )
