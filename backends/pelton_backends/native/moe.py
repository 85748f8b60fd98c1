"""The op of experts in C: `csrc/moe.c`. Plain weights are brought into panels once they are loaded, in their own memory; blocks stay."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, byref, c_float, c_int32, c_int64, c_void_p
from typing import TYPE_CHECKING, ClassVar

import torch

from pelton.errors import EngineError
from pelton.ops.packed_blocks import KINDS, kinds_of
from pelton_backends.native import library
from pelton_backends.native.library import ACTIVATIONS, DTYPES, NO_ACTIVATION, Linear
from pelton_backends.native.quant import KIND_NUMBERS, Part

if TYPE_CHECKING:
    from torch import Tensor

    from pelton.ops.moe import ExpertsSpec, MoeNeeds, MoeTensors

_CLAMPED = {"swiglu_oai": 3, "silu_clamped": 4}
_ACTIVATIONS = {**ACTIVATIONS, **_CLAMPED}


class _Moe(Structure):
    _fields_ = (
        ("gate_up", Linear), ("down", Linear), ("weight_stride", c_int64 * 2), ("bias_stride", c_int64 * 2),
        ("parts", Part * 3), ("part_stride", c_int64 * 3),
        ("router", c_void_p), ("router_bias", c_void_p), ("correction", c_void_p), ("load", c_void_p),
        ("num_experts", c_int64), ("top_k", c_int64), ("num_groups", c_int64), ("top_groups", c_int64),
        ("first_expert", c_int64), ("num_held", c_int64), ("copies", c_void_p), ("most_copies", c_int64),
        ("scale", c_float), ("router_dtype", c_int32), ("bias_dtype", c_int32), ("is_sigmoid", c_int32),
        ("is_renormalized", c_int32), ("is_top2", c_int32), ("scales_input", c_int32),
    )  # fmt: skip


class NativeMoe:
    handles = frozenset(
        [
            "has_correction",
            "scales_input",
            "limit",
            "has_bias",
            "has_router_bias",
            "counts_load",
            "weight_format",
            "first_expert",
            "num_held",
            "has_copies",
            "has_parts",
        ]
    )
    is_recordable: ClassVar[bool] = True

    @staticmethod
    def unsupported(needs: MoeNeeds) -> list[str]:
        reasons = []
        if needs.dtype not in DTYPES:
            reasons.append(f"dtype {needs.dtype}, only {', '.join(DTYPES)}")
        if needs.experts.weight_format != "plain" and kinds_of(needs.experts.weight_format) is None:
            reasons.append(f"weight format {needs.experts.weight_format!r}, only plain, {', '.join(KINDS)}")
        if needs.experts.activation not in _ACTIVATIONS:
            reasons.append(f"activation {needs.experts.activation!r}, only {', '.join(_ACTIVATIONS)}")
        if not reasons:  # compiles
            why = library.reason_against("quant", *library.groups_of_dtype(needs.dtype), dtype=needs.dtype)
            reasons += [why] if why else []
        return reasons

    @staticmethod
    def bind(needs: MoeNeeds, tensors: MoeTensors) -> _BoundMoe:
        return _BoundMoe(needs, tensors)


class _BoundMoe:
    """Shapes and dtypes as `pelton.ops.moe.Moe` says."""

    def __init__(self, needs: MoeNeeds, tensors: MoeTensors) -> None:
        routing, spec, weights = needs.routing, needs.experts, tensors.experts
        kernels = library.kernels("quant", dtype=needs.dtype)
        self._run, self._pack, self._rest = kernels.moe, kernels.moe_pack, kernels.rest
        self._choose, self._compute, self._top_k = kernels.moe_choose, kernels.moe_compute, routing.top_k
        router, bias = (_readable(one, needs.dtype) for one in (tensors.router, tensors.router_bias))
        self._kept = tensors, router, bias  # the struct has their addresses
        assert router is not None
        plain = {name: weights[name] for name in ("gate_up", "down") if spec.weight_format == "plain"}
        matrices = [
            Linear(
                weight=_address(plain.get(name)), bias=_address(weights.get(f"{name}_bias")),
                in_features=size, out_features=rows, output_stride=columns,
                soft_cap=(spec.limit or 0.0) if activation in _CLAMPED.values() else 0.0,
                activation=activation, dtype=DTYPES[needs.dtype],
            )
            for name, size, rows, columns, activation in (
                ("gate_up", spec.hidden_size, 2 * spec.intermediate_size, spec.intermediate_size, _ACTIVATIONS[spec.activation]),
                ("down", spec.intermediate_size, spec.hidden_size, spec.hidden_size, NO_ACTIVATION),
            )
        ]  # fmt: skip
        strides = [_stride(plain.get(name)) for name in ("gate_up", "down")]
        bias_strides = [_stride(weights.get(name)) for name in ("gate_up_bias", "down_bias")]
        parts = [] if plain else [weights[name] for name in ("gate", "up", "down")]
        copies = tensors.copies
        self.op = _Moe(
            matrices[0], matrices[1], (c_int64 * 2)(*strides), (c_int64 * 2)(*bias_strides),
            (Part * 3)(*_parts(spec, parts)), (c_int64 * 3)(*map(_stride, parts)),
            router.data_ptr(), _address(bias), _address(tensors.correction), _address(tensors.load),
            routing.num_experts, routing.top_k, routing.num_groups, routing.top_groups, spec.first_expert,
            routing.num_experts if spec.num_held is None else spec.num_held, _address(copies),
            0 if copies is None else copies.shape[1] - 1, routing.scale, _dtype(router),
            0 if bias is None else _dtype(bias), routing.scoring == "sigmoid", routing.is_renormalized,
            routing.group_score == "top2", routing.scales_input,
        )  # fmt: skip
        library.kernels_for(self.op.gate_up, self.op.down, dtype=needs.dtype)
        self._struct = ctypes.cast(byref(self.op), POINTER(_Moe))

    def __del__(self) -> None:
        """A thread that was held up may still read the weights, for a product that is done without it."""
        self._rest()

    def weights_loaded(self) -> None:
        """From here on only the kernels can read the experts' weights, where their shapes fit the kernels' order."""
        if self._pack(self._struct):
            raise EngineError("Experts' weights found no memory to be put in order. Give the process more memory.")

    def __call__(self, x: Tensor, slot_mapping: Tensor) -> Tensor:
        x, slot_mapping = x.contiguous(), slot_mapping.contiguous()
        output = torch.empty_like(x)
        _check(self._run(self._struct, x.data_ptr(), slot_mapping.data_ptr(), x.shape[0], output.data_ptr()), x)
        return output

    def choose(self, x: Tensor, slot_mapping: Tensor) -> tuple[Tensor, Tensor]:
        x, slot_mapping = x.contiguous(), slot_mapping.contiguous()
        places = torch.empty(len(x), self._top_k, dtype=torch.int32)
        shares = torch.empty(len(x), self._top_k)
        addresses = x.data_ptr(), slot_mapping.data_ptr(), len(x), places.data_ptr(), shares.data_ptr()
        _check(self._choose(self._struct, *addresses), x)
        return places, shares

    def compute(self, x: Tensor, places: Tensor, weights: Tensor) -> Tensor:
        x, places, weights = x.contiguous(), places.contiguous(), weights.contiguous()
        output = torch.empty_like(x)
        addresses = x.data_ptr(), places.data_ptr(), weights.data_ptr(), len(x), output.data_ptr()
        _check(self._compute(self._struct, *addresses), x)
        return output


def _check(is_failed: int, x: Tensor) -> None:
    if is_failed:
        raise EngineError(f"A layer of experts found no memory for {x.shape[0]} rows. Give the process more memory.")


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _stride(tensor: Tensor | None) -> int:
    """Bytes between experts."""
    return 0 if tensor is None else tensor.stride(0) * tensor.element_size()


def _parts(spec: ExpertsSpec, panels: list[Tensor]) -> list[Part]:
    """The first expert's blocks of gate, up and down; none where weights are plain."""
    if not panels:
        return []
    kinds = kinds_of(spec.weight_format) or []
    kinds = kinds * len(panels) if len(kinds) == 1 else kinds
    rows = (spec.intermediate_size, spec.intermediate_size, spec.hidden_size)
    return [
        Part(one.data_ptr(), num_rows, KIND_NUMBERS[kind.name])
        for one, num_rows, kind in zip(panels, rows, kinds, strict=True)
    ]


def _readable(tensor: Tensor | None, dtype: str) -> Tensor | None:
    """As float32 where it has other numbers of 16 bits than the model: a library has one kind."""
    return tensor if tensor is None or str(tensor.dtype) == f"torch.{dtype}" else tensor.float()


def _dtype(tensor: Tensor) -> int:
    return DTYPES[str(tensor.dtype).removeprefix("torch.")]
