"""Layers with states for tests of their backends: a layer over a pool that holds others' NaN, steps, and the recurrence in float64,
token by token."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from pelton.attention.interface import AttentionBackend, AttentionNeeds, KVLayout
from pelton.attention.metadata import BatchDescriptor, CommonMetadata
from pelton.kv_cache.spec import DTYPE_BYTES, MambaSpec

NUM_BLOCKS = 8
LEFT_ALONE = -7.0
"""In outputs before a step, and afterwards where none of its tokens is."""
TOLERANCES = {"float32": 2e-5, "float16": 3e-3, "bfloat16": 2e-2}
"""Of the largest output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateCase:
    """Sizes of a layer of Mamba-2."""

    attention_type: ClassVar[str] = "state"

    num_heads: int = 4
    head_dim: int = 8
    state_size: int = 6
    num_groups: int = 2
    taps: int = 4
    has_bias: bool = True
    dtype: str = "float32"
    dt_limit: tuple[float, float] = (0.0, 3.0)

    @property
    def inner(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def width(self) -> int:
        return self.inner + 2 * self.num_groups * self.state_size

    @property
    def columns(self) -> int:
        """Columns of the product: gate, x, B and C, dt."""
        return self.inner + self.width + self.num_heads

    @property
    def state_shape(self) -> tuple[int, ...]:
        return self.num_heads, self.head_dim, self.state_size

    def parts(self, made: Any, rows: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
        """Yield of each token, in float64 and of each head: the state's decay [H, 1, 1], what is added to it and what reads it."""
        dim, groups, size = self.head_dim, self.num_groups, self.state_size
        steps = rows[:, self.inner + self.width :].double()
        for mixed, step in zip(convolved(made, rows[:, self.inner : self.inner + self.width]), steps, strict=True):
            x, b, c = mixed.split([self.inner, groups * size, groups * size])
            b, c = (part.view(groups, size).repeat_interleave(self.num_heads // groups, dim=0) for part in (b, c))
            dt = F.softplus(step + made.dt_bias.double()).clamp(*made.dt_limit)
            yield torch.exp(-dt * made.a_log.double().exp()), dt, x.view(-1, dim), b, c

    def token(
        self, made: Any, state: torch.Tensor, parts: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(the state behind a token, its output [H, P])"""
        decay, dt, x, b, c = parts
        state = decay[:, None, None] * state + (dt[:, None] * x)[..., None] * b[:, None]
        return state, (state * c[:, None]).sum(-1) + made.d.double()[:, None] * x

    @property
    def needs(self) -> AttentionNeeds:
        return AttentionNeeds(
            head_dim=self.head_dim, num_heads=self.num_heads, num_kv_heads=self.num_groups, block_size=16, dtype=self.dtype,
            attention_type=self.attention_type,
        )  # fmt: skip

    def rows(self, count: int, device: Any = "cpu") -> torch.Tensor:
        return torch.randn(count, self.columns).to(getattr(torch, self.dtype)).to(device)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaCase(StateCase):
    """The same of a layer with the gated delta rule."""

    attention_type: ClassVar[str] = "delta_rule"
    max_beta: float = 1.0

    @property
    def columns(self) -> int:
        """Columns of the product: q, k and v, what makes b, what makes a, gate."""
        return self.width + self.num_heads * (1 + self.decays) + self.inner

    @property
    def decays(self) -> int:
        """Numbers of a head's decay."""
        return 1

    @property
    def state_shape(self) -> tuple[int, ...]:
        return self.num_heads, self.state_size, self.head_dim

    def parts(self, made: Any, rows: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
        groups, size, heads = self.num_groups, self.state_size, self.num_heads
        marks = rows[:, self.width : self.width + heads * (1 + self.decays)].double()
        for mixed, mark in zip(convolved(made, rows[:, : self.width]), marks, strict=True):
            q, k, v = mixed.split([groups * size, groups * size, self.inner])
            q, k = (part.view(groups, size).repeat_interleave(heads // groups, dim=0) for part in (q, k))
            q, k = (part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt() for part in (q, k))
            b, a = mark.split([heads, heads * self.decays])
            step = F.softplus(a + made.dt_bias.double()).view(heads, -1)
            yield (
                torch.exp(-made.a_log.double().exp()[:, None] * step),
                made.max_beta * torch.sigmoid(b),
                q * size**-0.5,
                k,
                v.view(heads, -1),
            )

    def token(
        self, made: Any, state: torch.Tensor, parts: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        decay, rate, q, k, v = parts
        state = decay[..., None] * state
        state = state + k[..., None] * (rate[:, None] * (v - (state * k[..., None]).sum(1)))[:, None]
        return state, (state * q[..., None]).sum(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyDeltaCase(DeltaCase):
    """The same with a decay for each number of a key."""

    attention_type: ClassVar[str] = "key_delta_rule"

    @property
    def decays(self) -> int:
        return self.state_size


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanCase(StateCase):
    """The same of a layer of Mamba: `num_heads` times `head_dim` numbers with states of their own. Its step sizes, B and C are made of
    what is convolved."""

    attention_type: ClassVar[str] = "selective_scan"

    @property
    def width(self) -> int:
        return self.inner

    @property
    def columns(self) -> int:
        """Columns of the product: x, gate."""
        return 2 * self.inner

    @property
    def state_shape(self) -> tuple[int, ...]:
        return self.inner, self.state_size

    def parts(self, made: Any, rows: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
        x = convolved(made, rows[:, : self.inner])
        yield from zip(*made.selected(x.float()), x, strict=True)

    def token(
        self, made: Any, state: torch.Tensor, parts: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dt, b, c, x = (part.double() for part in parts)
        state = torch.exp(-dt[:, None] * made.a_log.double().exp()) * state + (dt * x)[:, None] * b
        return state, state @ c + made.d.double() * x


@dataclass(frozen=True, slots=True, kw_only=True)
class RgLruCase(StateCase):
    """The same of a real-gated linear recurrent unit: `num_heads` times `head_dim` numbers, each with a state of one."""

    attention_type: ClassVar[str] = "rg_lru"
    state_size: int = 1

    @property
    def width(self) -> int:
        return self.inner

    @property
    def columns(self) -> int:
        """Columns of the product: x, gate."""
        return 2 * self.inner

    @property
    def state_shape(self) -> tuple[int, ...]:
        return (self.inner,)

    def parts(self, made: Any, rows: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
        decay, given = made.gated(convolved(made, rows[:, : self.inner], is_activated=False).float())
        is_first = torch.arange(len(rows), device=rows.device) == 0
        yield from zip(decay.double(), given.double(), is_first, strict=True)

    def token(
        self, made: Any, state: torch.Tensor, parts: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        decay, given, is_first = parts
        factor = 1.0 if is_first else (-torch.expm1(2 * decay)).sqrt()
        state = torch.exp(decay) * state + factor * given
        return state, state


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedConvCase(StateCase):
    """The same of a short convolution between two gates."""

    attention_type: ClassVar[str] = "short_conv"
    state_size: int = 0

    @property
    def width(self) -> int:
        return self.inner

    @property
    def columns(self) -> int:
        """Columns of the product: two gates, x."""
        return 3 * self.inner

    @property
    def state_shape(self) -> tuple[int, ...]:
        return (0,)

    def parts(self, made: Any, rows: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
        before, behind, x = rows.split(self.inner, dim=-1)
        yield from zip(behind.double(), convolved(made, before * x, is_activated=False), strict=True)

    def token(
        self, made: Any, state: torch.Tensor, parts: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        behind, mixed = parts
        return state, behind * mixed


@dataclass(frozen=True, slots=True, kw_only=True)
class LightningCase(StateCase):
    """The same of a layer with lightning attention, which has no convolution: `head_dim` numbers of a key and of a value."""

    attention_type: ClassVar[str] = "lightning"
    taps: int = 1

    @property
    def width(self) -> int:
        return 3 * self.inner

    @property
    def columns(self) -> int:
        """Columns of the product: q, k and v, gate."""
        return 4 * self.inner

    @property
    def state_shape(self) -> tuple[int, ...]:
        return self.num_heads, self.head_dim, self.head_dim

    def parts(self, made: Any, rows: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
        for mixed in F.silu(rows[:, : self.width].double()):
            yield mixed.view(3, self.num_heads, self.head_dim).unbind()

    def token(
        self, made: Any, state: torch.Tensor, parts: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = parts
        state = torch.exp(-made.slopes.double())[:, None, None] * state + v[..., None] * k[:, None]
        return state, (state * q[:, None]).sum(-1)


def make_layer(case: StateCase, device: Any = "cpu") -> Any:
    """Numbers of a layer, and states as the pool has them: one behind the other in pages, which are padded."""
    dtype = getattr(torch, case.dtype)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(*shape).to(dtype).to(device)

    shapes = (((case.width, case.taps - 1), case.dtype), (case.state_shape, "float32"))
    size = sum(math.prod(shape) * DTYPE_BYTES[name] for shape, name in shapes)
    spec = MambaSpec(block_size=512, state_bytes=size, states=shapes, page_size_padded=-(-size // 64) * 64 + 64)
    memory = torch.zeros(NUM_BLOCKS * spec.page_size_bytes, dtype=torch.uint8, device=device)
    conv_states, states = spec.views(memory, NUM_BLOCKS, KVLayout())
    conv_states.fill_(torch.nan)
    states.fill_(torch.nan)
    made = SimpleNamespace(
        needs=case.needs, num_heads=case.num_heads, head_dim=case.head_dim, num_groups=case.num_groups,
        state_size=case.state_size, conv_weight=numbers(case.width, case.taps),
        conv_bias=numbers(case.width) if case.has_bias else None, dt_bias=numbers(case.num_heads * getattr(case, "decays", 1)).float(),
        a_log=numbers(case.num_heads).float(), d=numbers(case.num_heads).float(), dt_limit=case.dt_limit,
        max_beta=getattr(case, "max_beta", None), slopes=torch.rand(case.num_heads, device=device) + 1e-3,
        conv_states=conv_states, states=states, case=case,
    )  # fmt: skip
    if isinstance(case, ScanCase):
        _select(made, case, device)
    if isinstance(case, RgLruCase):
        _gate(made, case, device)
    return made


def _select(made: Any, case: ScanCase, device: Any) -> None:
    """Give it numbers for each of a token's, and a `selected` of few."""
    made.a_log, made.d = torch.randn(case.inner, case.state_size, device=device), torch.randn(case.inner, device=device)
    weight = torch.randn(2, case.state_size, case.inner, device=device) * case.inner**-0.5

    def selected(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        assert not x.isnan().any(), "padding is read too"
        x = x.float()
        return F.softplus(x - 1.0), x @ weight[0].t(), x @ weight[1].t()

    made.selected = selected


def _gate(made: Any, case: RgLruCase, device: Any) -> None:
    """Give it decays of a token's numbers, some of which fade slowly and some at once."""
    rates = torch.logspace(-2, 1, case.inner, device=device)

    def gated(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert not x.isnan().any(), "padding is read too"
        x = x.float()
        return -rates * torch.sigmoid(x), 0.5 * x

    made.gated = gated


def convolved(made: Any, rows: torch.Tensor, *, is_activated: bool = True) -> torch.Tensor:
    """[L, W] -> [L, W] in float64, through the layer's convolution and SiLU."""
    padded = F.pad(rows.double().t(), (made.conv_weight.shape[1] - 1, 0))
    mixed = (padded.unfold(1, made.conv_weight.shape[1], 1) * made.conv_weight.double()[:, None]).sum(-1).t()
    mixed = mixed if made.conv_bias is None else mixed + made.conv_bias.double()
    return F.silu(mixed) if is_activated else mixed


def recurrence(made: Any, rows: torch.Tensor) -> torch.Tensor:
    """The product's rows [L, ...] -> [L, E] in float64, one token after the other, from the row's first on."""
    state, found = torch.zeros(made.states.shape[1:], dtype=torch.float64, device=rows.device), []
    for parts in made.case.parts(made, rows):
        state, output = made.case.token(made, state, parts)
        found.append(output.flatten())
    return torch.stack(found).cpu()


def make_backend(kind: type[AttentionBackend], case: StateCase, device: Any = "cpu") -> AttentionBackend:
    return kind(case.needs, torch.device(device), max_num_seqs=8, max_num_tokens=1024, max_model_len=1024)


def run_step(
    bound: Any,
    backend: AttentionBackend,
    parts: Sequence[torch.Tensor],
    seen: Sequence[int],
    blocks: Sequence[int],
    *,
    key: BatchDescriptor | None = None,
) -> list[torch.Tensor]:
    """Rows of one step: their tokens, how many each has had before, and the blocks of their states. key: the step is captured, and
    padded to its sizes. Checks that padding's outputs are left alone."""
    device, lengths = parts[0].device, [len(part) for part in parts]
    total, num_padding = sum(lengths), 0 if key is None else key.num_tokens - sum(lengths)
    padded_rows = 0 if key is None else key.num_reqs - len(parts)
    assert num_padding >= 0 and padded_rows >= 0

    def integers(numbers: Sequence[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=device)

    decodes = next((row for row, length in enumerate(lengths) if length != 1), len(lengths))
    nothing = [0] * padded_rows
    common = CommonMetadata(
        query_start_loc=integers([0, *accumulate(lengths), *(total for _ in nothing)]),
        seq_lens=integers([*(before + length for before, length in zip(seen, lengths, strict=True)), *nothing]),
        block_table=integers([*blocks, *nothing])[:, None], num_reqs=len(parts) + padded_rows,
        slot_mapping=torch.full((total + num_padding,), -1, device=device), num_tokens=total + num_padding,
        num_actual_tokens=total, num_decode_rows=decodes, num_decode_tokens=decodes, max_query_len=max(lengths),
        max_seq_len=512,
    )  # fmt: skip
    rows = torch.cat([*parts, parts[0].new_full((num_padding, parts[0].shape[1]), torch.nan)])
    inner = bound.layer.num_heads * bound.layer.head_dim
    output = rows.new_full((len(rows), inner), LEFT_ALONE)
    bound(rows, backend.build(common, key), output)
    assert (output[total:] == LEFT_ALONE).all(), "padding is left alone"
    return list(output[:total].split(lengths))


def in_pieces(
    kind: type[AttentionBackend], case: StateCase, cuts: Sequence[int], device: Any = "cpu"
) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """The layer, a row's tokens in block 5, and its outputs, step by step."""
    made, backend = make_layer(case, device), make_backend(kind, case, device)
    bound, rows, found, seen = backend.bind(made), case.rows(sum(cuts), device), [], 0
    for count in cuts:
        found += run_step(bound, backend, [rows[seen : seen + count]], [seen], [5])
        seen += count
    return made, rows, torch.cat(found)


def check(found: torch.Tensor, expected: torch.Tensor, dtype: str) -> None:
    """Compare with the recurrence's numbers, by the largest of them."""
    worst, most = float((found.double().cpu() - expected).abs().max()), float(expected.abs().max())
    assert worst <= TOLERANCES[dtype] * most, f"{worst} of {most}"
