"""Attention and gated MLPs of transformers' modules, found by trying them with numbers in the place of their products.

A module that computes what Pelton's ops do is named as a part, and those ops run in its place. Any other one stays as it is: a
trial that ends in an exception says nothing but that.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pelton.ops.interface import NormSpec
from pelton.ops.reference import ACTIVATIONS, rms_norm, rotate
from pelton_plugins.transformers_models.attention import received_by
from pelton_plugins.transformers_models.norms import find_norm

if TYPE_CHECKING:
    from pelton_plugins.transformers_models.trace import Call, Trace, TracedAttention

_POSITIONS = (0, 5, 2)
_SIZES = (1.0, 1.0, 100.0)
"""Of each position's numbers: a module that clips some is seen by the large ones."""


def _is_close(one: Tensor, other: Tensor) -> bool:
    largest = other.abs().amax(dim=-1, keepdim=True)
    return bool(((one - other).abs() <= 1e-5 + 1e-4 * other.abs() + 1e-6 * largest).all())


@dataclass(frozen=True, slots=True)
class AttentionPart:
    """A module that computes o(attention(rope(norm(q(x))), rope(norm(k(x))), v(x)))."""

    qkv: list[str]
    """Names of the linear modules whose outputs beside each other are queries, keys and values."""
    output: str
    q_norm: str | None
    k_norm: str | None
    rope: Tensor | None
    """The cosines that its call got, as the trace knows them; None without a rotation."""
    hidden: int | str
    """Place or name of the argument x."""
    num_results: int | None
    """Length of the tuple that it returns, the rest of which is None; None where it returns a tensor."""


@dataclass(frozen=True, slots=True)
class GatedPart:
    """A module that computes down(activation(gate(x)) * up(x))."""

    gate_up: list[str]
    down: str
    activation: str
    hidden: int | str


def _reads_buffers(module: nn.Module) -> bool:
    """Return whether a checkpoint has buffers of it, which are not there before it is loaded."""
    return any(set(one._buffers) - one._non_persistent_buffers_set for one in module.modules())


class _Untried(Exception):
    """An argument of which a trial does not know what it is."""


class _Given(nn.Module):
    """In a module's place: notes its input and what `compute` makes of it. values: the outputs as they were given, since a module may
    write into them."""

    def __init__(self, compute: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.compute = compute
        self.inputs: list[Tensor] = []
        self.outputs: list[Tensor] = []
        self.values: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.inputs.append(x)
        self.outputs.append(self.compute(x))
        self.values.append(self.outputs[-1].clone())
        return self.outputs[-1]


class Trials:
    """Trials of one model's modules."""

    def __init__(self, model: nn.Module, traced: Trace) -> None:
        """model: with its vectors and buffers on the CPU."""
        self._model, self._traced = model, traced
        self._random = torch.Generator().manual_seed(0)

    def attention(self, name: str, traced: TracedAttention) -> AttentionPart | None:
        try:
            with torch.no_grad():
                return self._attention(name, traced)
        except Exception:
            return None

    def gated(self, name: str) -> GatedPart | None:
        try:
            with torch.no_grad():
                return self._gated(name)
        except Exception:
            return None

    def cos_sin(self, cosines: Tensor, num_positions: int) -> Tensor:
        """Return [num_positions, rotary_dim] float32: a table of cosines, then of sines."""
        cos, sin = self._half_tables(cosines, torch.arange(num_positions))
        return torch.cat([cos, sin], dim=-1)

    # What a module is tried with.

    def _randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._random)

    def _made(self, call: Call, name: str, positions: Tensor) -> Any:
        """The output of a module without parameters."""
        module = self._model.get_submodule(name)
        if next(module.parameters(), None) is not None or _reads_buffers(module):
            raise _Untried(name)
        values = self._values(positions)
        return module(*values(call.args), **values(call.kwargs))

    def _values(self, positions: Tensor) -> Callable[[Any], Any]:
        """From what a call got on the meta device to numbers: the same tensor is the same numbers."""
        known: dict[int, Tensor] = {}

        def value(given: Any) -> Any:
            if isinstance(given, tuple | list):
                return type(given)(value(one) for one in given)
            if isinstance(given, Mapping):
                return {key: value(one) for key, one in given.items()}
            if not isinstance(given, Tensor):
                return given
            if id(given) not in known:
                known[id(given)] = tensor(given)
            return known[id(given)]

        def tensor(given: Tensor) -> Tensor:
            made = self._traced.made.get(id(given))
            if made is not None and next(self._model.get_submodule(made.module).parameters(), None) is None:
                found = self._made(made.call, made.module, positions)
                return found if made.index is None else found[made.index]  # type: ignore[no-any-return]
            if given is self._traced.positions:
                return positions[None]
            if not given.is_floating_point():
                raise _Untried(str(given))
            return self._randn(*given.shape)

        return value

    def _half_tables(self, cosines: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines [positions, rotary_dim / 2] of the call that gave `cosines`.

        Raises `AssertionError` where the numbers of a pair are not rotary_dim / 2 apart.
        """
        made = self._traced.made[id(cosines)]
        assert made.index == 0
        cos, sin = self._made(made.call, made.module, positions)
        half = cos.shape[-1] // 2
        assert cos.shape == sin.shape == (1, len(positions), 2 * half)
        for table in (cos, sin):
            assert torch.equal(table[..., :half], table[..., half:])
        return cos[0, :, :half].float(), sin[0, :, :half].float()

    # The trials.

    def _children(
        self, name: str, groups: Sequence[Sequence[str]]
    ) -> tuple[nn.Module, dict[str, _Given], dict[str, NormSpec]]:
        """Copy a module, all of whose parameters are in linear modules and RMS norms right below it, with others in their place.

        Returns it, those by their names, and the norms' specs.
        """
        module = self._model.get_submodule(name)
        tried = copy.copy(module)
        tried._modules = dict(module._modules)
        stand_ins: dict[str, _Given] = {}
        specs: dict[str, NormSpec] = {}
        for group in groups:
            for linear_name in group:
                linear: Any = self._model.get_submodule(linear_name)
                stand_ins[linear_name] = _Given(self._outputs(linear.out_features))
        for child, one in module._modules.items():
            spec = None if one is None or f"{name}.{child}" in stand_ins else find_norm(one)
            if spec is not None:
                specs[f"{name}.{child}"] = spec
                stand_ins[f"{name}.{child}"] = _Given(self._normed(spec))
        for full, stand_in in stand_ins.items():
            parent, _, child = full.rpartition(".")
            assert parent == name
            tried._modules[child] = stand_in
        assert next(tried.parameters(), None) is None and not _reads_buffers(tried)
        return tried, stand_ins, specs

    def _outputs(self, size: int) -> Callable[[Tensor], Tensor]:
        sizes = torch.tensor(_SIZES)[:, None]
        return lambda x: sizes * self._randn(*x.shape[:-1], size)

    def _normed(self, spec: NormSpec) -> Callable[[Tensor], Tensor]:
        weight = self._randn(spec.size)

        def norm(x: Tensor) -> Tensor:
            return rms_norm(x, weight, spec)

        norm.weight = weight  # type: ignore[attr-defined]
        return norm

    def _groups(self, name: str) -> list[list[str]]:
        """Products of a module's own, in the order of their calls."""
        return [group for group in self._traced.products if any(one.startswith(f"{name}.") for one in group)]

    def _attention(self, name: str, traced: TracedAttention) -> AttentionPart | None:
        qkv, [output] = self._groups(name)
        tried, stand_ins, specs = self._children(name, [qkv, [output]])
        call = self._traced.calls[name]
        values = self._values(torch.tensor(_POSITIONS))
        args, kwargs = values(call.args), values(call.kwargs)
        receiver = _Attended(self._randn)
        with received_by(receiver):
            result = tried(*args, **kwargs)
        hidden = _place_of(stand_ins[qkv[0]].inputs[0], args, kwargs)
        for one in [*qkv, output]:
            [x] = stand_ins[one].inputs
            assert one == output or x is stand_ins[qkv[0]].inputs[0]
        [attended] = receiver.outputs
        x, y = stand_ins[output].inputs[0], stand_ins[output].outputs[0]
        assert torch.equal(x.reshape(attended.shape), attended)
        assert (result if isinstance(result, Tensor) else result[0]) is y and torch.equal(
            y, stand_ins[output].values[0]
        )
        assert isinstance(result, Tensor) or all(one is None for one in result[1:])
        cosines = [
            one for given in (*call.args, *call.kwargs.values())
            for one in (given if isinstance(given, tuple | list) else [given])
            if isinstance(one, Tensor) and (made := self._traced.made.get(id(one))) is not None and made.index == 0
            and next(self._model.get_submodule(made.module).parameters(), None) is None
        ]  # fmt: skip
        called = [one for one in specs if stand_ins[one].inputs]
        if called not in ([], list(specs)) or len(called) not in (0, 2):
            return None
        given = torch.cat([stand_ins[one].values[0] for one in qkv], dim=-1)[0]
        norms = [(stand_ins[one].compute.weight, specs[one]) for one in called]  # type: ignore[attr-defined]
        for rope in [None, *cosines]:
            if self._is_attention(given, receiver, traced, norms, rope):
                return AttentionPart(
                    qkv, output, *(called or [None, None]), rope, hidden,
                    None if isinstance(result, Tensor) else len(result),
                )  # fmt: skip
        return None

    def _is_attention(
        self, given: Tensor, receiver: _Attended, traced: TracedAttention, norms: list[tuple[Tensor, NormSpec]],
        cosines: Tensor | None,
    ) -> bool:  # fmt: skip
        """Return whether attention got the products [T, (num_heads + 2 num_kv_heads) D] normed and turned."""
        heads, kv_heads, dim = traced.num_heads, traced.num_kv_heads, traced.head_dim
        expected = list(given.view(len(given), -1, dim).split([heads, kv_heads, kv_heads], dim=1))
        for index, (weight, spec) in enumerate(norms):
            if spec.size != dim:
                return False
            expected[index] = rms_norm(expected[index], weight, spec)
        if cosines is not None:
            try:
                cos, sin = (table[:, None] for table in self._half_tables(cosines, torch.tensor(_POSITIONS)))
            except AssertionError:
                return False
            expected[:2] = [rotate(one, cos, sin) for one in expected[:2]]
        return all(_is_close(one.transpose(0, 1), seen[0]) for one, seen in zip(expected, receiver.seen, strict=True))

    def _gated(self, name: str) -> GatedPart | None:
        gate_up, [down] = self._groups(name)
        tried, stand_ins, _ = self._children(name, [gate_up, [down]])
        call = self._traced.calls[name]
        values = self._values(torch.tensor(_POSITIONS))
        args, kwargs = values(call.args), values(call.kwargs)
        result = tried(*args, **kwargs)
        hidden = _place_of(stand_ins[gate_up[0]].inputs[0], args, kwargs)
        assert result is stand_ins[down].outputs[0] and torch.equal(result, stand_ins[down].values[0])
        assert all(stand_ins[one].inputs[0] is stand_ins[gate_up[0]].inputs[0] for one in gate_up)
        [x] = stand_ins[down].inputs
        orders = [gate_up] if len(gate_up) == 1 else [gate_up, gate_up[::-1]]
        for order in orders:
            gate, up = torch.cat([stand_ins[one].values[0] for one in order], dim=-1).chunk(2, dim=-1)
            for activation, computed in ACTIVATIONS.items():
                if _is_close(computed(gate) * up, x):
                    return GatedPart(order, down, activation, hidden)
        return None


class _Attended:
    """A `Receiver` that answers with random numbers."""

    def __init__(self, randn: Callable[..., Tensor]) -> None:
        self._randn = randn
        self.seen: tuple[Tensor, Tensor, Tensor]
        self.outputs: list[Tensor] = []

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, options: Mapping[str, Any]
    ) -> Tensor:
        self.seen = query.clone(), key.clone(), value.clone()
        self.outputs.append(self._randn(1, query.shape[2], query.shape[1], value.shape[3]))
        return self.outputs[-1].clone()

    def make_mask(self, options: Mapping[str, Any]) -> None:
        return None


def _place_of(x: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int | str:
    """Return where a call's arguments have `x`. Raises `StopIteration` where they do not."""
    places: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    return next(place for place, one in places if one is x)
