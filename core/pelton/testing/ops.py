"""Conformance of fused ops: an implementation gives what the op's reference gives, run with pytest.

Subclass `OpConformance` in a test module and set `op` and `implementation`; for core's ops `cases` are given. For an op of your
own, or a weight format of your own, override `cases` (and `reference`, where the op's own cannot read the format).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from pelton.config import EngineConfig
from pelton.entries import Entry
from pelton.ops.interface import (
    FUSED_OPS,
    AddNormGatedLinearNeeds,
    AddNormGatedLinearTensors,
    AddNormLinearNeeds,
    AddNormLinearTensors,
    AddNormLogitsNeeds,
    AddNormLogitsTensors,
    AddNormNeeds,
    AddNormTensors,
    EmbedNeeds,
    EmbedTensors,
    FusedOp,
    GatedNeeds,
    GatedTensors,
    LinearNeeds,
    LinearSpec,
    LinearTensors,
    LinearWeights,
    NormSpec,
    OpImplementation,
)
from pelton.ops.selector import reasons_against
from pelton.testing.plugins import references

TOLERANCES = {"float32": 2e-5, "bfloat16": 3e-2, "float16": 5e-3}
"""Absolute and relative; numbers are of size 1."""

Weights = Callable[[int, int, bool], LinearWeights]
"""(in, out, with a bias) -> one matrix of random numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpCase:
    """One call: what the op is bound to, and what it is called with."""

    name: str
    needs: Any
    tensors: Any
    inputs: tuple[Any, ...]

    @property
    def num_tokens(self) -> int:
        return int(self.inputs[0].shape[0])


class OpConformance:
    op: ClassVar[FusedOp]
    implementation: ClassVar[Any]
    dtype: ClassVar[str] = "float32"
    device: ClassVar[str] = "cpu"
    least_served: ClassVar[int] = 1  # cases: refusing all is not a way to pass

    def cases(self) -> Iterable[OpCase]:
        return op_cases(self.op.name, self.dtype, self.device)

    def reference(self) -> OpImplementation:
        """The op's own reference, or for core's ops the entry `reference.<name>`."""
        if self.op.reference is not None:
            found: OpImplementation = Entry(name=self.op.name, load=self.op.reference).resolve()
            return found
        entry = next((entry for entry in references(self.device) if entry.op == self.op.name), None)
        assert entry is not None, f"op {self.op.name} has no reference: override `reference`"
        served: OpImplementation = entry.resolve()
        return served

    def tolerance(self) -> float:
        return TOLERANCES[self.dtype]

    def served(self) -> list[OpCase]:
        """The cases whose needs and number of tokens the implementation takes."""
        found, refused = [], {}
        for case in self.cases():
            assert isinstance(case.needs, self.op.needs), f"{case.name}: needs are a {type(case.needs).__name__}"
            if reasons := reasons_against(self.implementation, case.needs):
                refused[case.name] = ", ".join(reasons)
                continue
            token_range = getattr(self.implementation, "token_range", None)
            least, most = token_range(case.needs) if token_range else (0, None)
            if least <= case.num_tokens and (most is None or case.num_tokens <= most):
                found.append(case)
        assert len(found) >= self.least_served, (
            f"{len(found)} cases are served, at least {self.least_served} are wanted: override `cases` where yours are others. "
            f"Refused: {refused}"
        )
        return found

    def test_gives_what_the_reference_gives(self) -> None:
        reference = self.reference()
        for case in self.served():
            own, others = deepcopy(case.tensors), deepcopy(case.tensors)
            call = self.implementation.bind(case.needs, own)
            prepare = getattr(call, "weights_loaded", None)
            if prepare is not None:
                prepare()
            wanted = reference.bind(case.needs, others)(*deepcopy(case.inputs))
            for turn in ("first", "second"):
                self._check(f"{case.name}, {turn} call", call(*deepcopy(case.inputs)), wanted)

    def test_says_why_it_refuses(self) -> None:
        for case in self.cases():
            for reason in self.implementation.unsupported(case.needs):
                assert isinstance(reason, str) and reason, f"{case.name}: a reason is a text, not {reason!r}"

    def test_settings_make_an_implementation_of_their_own(self) -> None:
        """Where it reads settings (`configured`): each engine has its own."""
        if (configured := getattr(self.implementation, "configured", None)) is None:
            return
        first, second = configured(EngineConfig()), configured(EngineConfig())
        for made in (first, second):
            assert callable(made.unsupported) and callable(made.bind), f"configured gives {made!r}"
        assert first is not self.implementation, "return another object than the one that all engines share"

    def test_names_only_needs_that_there_are(self) -> None:
        known = _field_names(self.op.needs).union(*(_field_names(op.needs) for op in FUSED_OPS.values())) | _SPEC_FIELDS
        unknown = set(getattr(self.implementation, "handles", ())) - known
        assert not unknown, f"`handles` names {sorted(unknown)}, which no need is called"

    def _check(self, name: str, found: Any, wanted: Any) -> None:
        found, wanted = (value if isinstance(value, tuple) else (value,) for value in (found, wanted))
        assert len(found) == len(wanted), f"{name}: {len(found)} results, not {len(wanted)}"
        for one, other in zip(found, wanted, strict=True):
            assert one.dtype == other.dtype and one.shape == other.shape, f"{name}: {one.dtype} {list(one.shape)}"
            torch.testing.assert_close(
                one.double(), other.double(), atol=self.tolerance(), rtol=self.tolerance(), equal_nan=True,
                msg=lambda text: f"{name}: {text}",
            )  # fmt: skip


def _field_names(kind: Any) -> set[str]:
    return {one.name for one in fields(kind)}


_SPEC_FIELDS = _field_names(LinearSpec) | _field_names(NormSpec)


def op_cases(op: str, dtype: str = "float32", device: str = "cpu", *, weights: Weights | None = None) -> list[OpCase]:
    """For core's ops of a dense layer. weights: makes matrices in a format of your own; plain ones when None."""
    if op not in _CASES:
        pytest.fail(f"there are no cases for op {op!r}: override `cases`; there are some for {', '.join(_CASES)}")
    return list(_CASES[op](_Maker(dtype, device, weights)))


def ops_with_cases() -> frozenset[str]:
    """Return the ops that `op_cases` has cases for."""
    return frozenset(_CASES)


class _Maker:
    """Random tensors, the same ones in each run."""

    def __init__(self, dtype: str, device: str, weights: Weights | None) -> None:
        self.dtype, self._device = dtype, device
        self._generator = torch.Generator().manual_seed(0)
        self.weights = weights or self._plain

    def numbers(self, *shape: int, scale: float = 1.0, around: float = 0.0) -> Tensor:
        drawn = torch.randn(shape, generator=self._generator) * scale + around
        return drawn.to(getattr(torch, self.dtype)).to(self._device)

    def ids(self, count: int, limit: int) -> Tensor:
        return torch.randint(0, limit, (count,), generator=self._generator).to(self._device)

    def norm(self, size: int, *, unit_offset: bool) -> tuple[NormSpec, Tensor]:
        around = 0.0 if unit_offset else 1.0
        return NormSpec(size=size, eps=1e-5, unit_offset=unit_offset), self.numbers(size, scale=0.2, around=around)

    def rows(self, count: int, size: int, *, has_residual: bool) -> tuple[Tensor, Tensor | None]:
        return self.numbers(count, size), self.numbers(count, size) if has_residual else None

    def _plain(self, in_features: int, out_features: int, has_bias: bool) -> LinearWeights:
        spec = LinearSpec(in_features=in_features, out_features=out_features, has_bias=has_bias)
        weight = self.numbers(out_features, in_features, scale=in_features**-0.5)
        return LinearWeights(spec, {"weight": weight}, self.numbers(out_features) if has_bias else None)


# Number of rows, in, out, bias, residual, post-norm, unit offset: each value of one beside several of the others.
_GRID = (
    (1, 64, 96, False, True, False, False),
    (1, 96, 64, True, False, False, True),
    (2, 64, 64, False, True, True, False),
    (5, 160, 32, True, True, True, True),
    (17, 64, 96, False, False, True, False),
    (40, 96, 160, True, True, False, False),
)


def _embed_cases(make: _Maker) -> Iterator[OpCase]:
    for count, scale in ((1, None), (7, 8.0), (40, None)):
        weights = make.weights(64, 96, False)
        needs = EmbedNeeds(
            dtype=make.dtype, num_rows=96, hidden_size=64, scale=scale, weight_format=weights.spec.weight_format
        )
        (matrix,) = weights.tensors.values()
        tensors = EmbedTensors(matrix, 0, weights)
        yield OpCase(name=f"{count} ids, scale {scale}", needs=needs, tensors=tensors, inputs=(make.ids(count, 96),))


def _linear_cases(make: _Maker) -> Iterator[OpCase]:
    for count, size, out, has_bias, *_ in _GRID:
        weights = make.weights(size, out, has_bias)
        yield OpCase(
            name=f"{count} x {size} x {out}, bias {has_bias}", needs=LinearNeeds(dtype=make.dtype, linear=weights.spec),
            tensors=LinearTensors(weights), inputs=(make.numbers(count, size),),
        )  # fmt: skip


def _gated_cases(make: _Maker) -> Iterator[OpCase]:
    for count, activation in ((1, "silu"), (5, "gelu"), (17, "gelu_tanh")):
        gate_up = make.numbers(count, 2 * 48)
        needs = GatedNeeds(dtype=make.dtype, size=48, activation=activation)
        yield OpCase(
            name=f"{count} rows, {activation}", needs=needs, tensors=GatedTensors(gate_up.device), inputs=(gate_up,)
        )


def _normed_cases(make: _Maker, needs_of: Callable[..., Any], tensors_of: Callable[..., Any]) -> Iterator[OpCase]:
    for count, size, out, has_bias, has_residual, has_post, unit_offset in _GRID:
        spec, norm = make.norm(size, unit_offset=unit_offset)
        post, post_norm = make.norm(size, unit_offset=unit_offset) if has_post else (None, None)
        weights = make.weights(size, out, has_bias)
        name = f"{count} x {size} x {out}, bias {has_bias}, residual {has_residual}, post-norm {has_post}, 1 + w {unit_offset}"
        yield OpCase(
            name=name, needs=needs_of(norm=spec, post_norm=post, dtype=make.dtype, spec=weights.spec),
            tensors=tensors_of(norm, weights, post_norm), inputs=make.rows(count, size, has_residual=has_residual),
        )  # fmt: skip


def _add_norm_cases(make: _Maker) -> Iterator[OpCase]:
    yield from _normed_cases(
        make, lambda spec, **needs: AddNormNeeds(**needs), lambda norm, _, post: AddNormTensors(norm, post)
    )


def _add_norm_linear_cases(make: _Maker) -> Iterator[OpCase]:
    yield from _normed_cases(make, lambda spec, **needs: AddNormLinearNeeds(linear=spec, **needs), AddNormLinearTensors)


def _add_norm_gated_linear_cases(make: _Maker) -> Iterator[OpCase]:
    for activation in ("silu", "gelu_tanh"):
        yield from _normed_cases(
            make, lambda spec, act=activation, **needs: AddNormGatedLinearNeeds(linear=spec, activation=act, **needs),
            AddNormGatedLinearTensors,
        )  # fmt: skip


def _add_norm_logits_cases(make: _Maker) -> Iterator[OpCase]:
    for soft_cap in (None, 3.0):
        for case in _normed_cases(
            make,
            lambda spec, cap=soft_cap, **needs: AddNormLogitsNeeds(
                linear=spec, vocab_size=spec.out_features - 3, soft_cap=cap, **needs
            ),
            AddNormLogitsTensors,
        ):
            rows = torch.arange(0, case.num_tokens, 2, device=case.inputs[0].device).flip(0)
            yield OpCase(name=case.name, needs=case.needs, tensors=case.tensors, inputs=(*case.inputs, rows))


_CASES: dict[str, Callable[[_Maker], Iterator[OpCase]]] = {
    "embed": _embed_cases,
    "add_norm": _add_norm_cases,
    "linear": _linear_cases,
    "gated": _gated_cases,
    "add_norm_linear": _add_norm_linear_cases,
    "add_norm_gated_linear": _add_norm_gated_linear_cases,
    "add_norm_logits": _add_norm_logits_cases,
}
assert set(_CASES) <= set(FUSED_OPS)
