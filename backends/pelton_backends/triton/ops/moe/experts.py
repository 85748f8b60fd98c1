"""The op of experts.

Few tokens are organised by output rows: each program reads rows of the experts that one token chose. Of more, the choice itself lists
each expert's pairs, so that its weights are read once for all its tokens, in tiles of its pairs; of many tokens the rows are sorted by
expert, and both matrices are one product each (`hopper`). Packed weights are decoded as they are read (`packed`), or multiplied as they
are (`streamed`, `split`), or, for a product over sorted rows, decoded all at once into memory of that call. All sizes of memory and
grids follow from the number of tokens, so that a captured step serves whatever is chosen; a tile that no expert has ends at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton

from pelton.ops.interface import InputRounding
from pelton_backends.triton.launch import Launcher, alignment
from pelton_backends.triton.ops.linear.gemv import DTYPES, inner_contiguous
from pelton_backends.triton.ops.moe import (
    choose,
    hopper,
    hopper_int4,
    hopper_mxfp4,
    hopper_three_groups,
    kernels,
    packed,
    streamed,
)
from pelton_backends.triton.ops.moe.split import split
from pelton_backends.triton.ops.moe.unsummed import UnsummedRows
from pelton_backends.triton.ops.pieces import ACTIVATIONS, is_hopper, kept_policy
from pelton_backends.triton.runtime import has_pdl, launch_options

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from torch import Tensor

    from pelton.ops.moe import Moe, MoeNeeds, MoeTensors

FEW_PAIRS = 32  # up to here by output rows
FEW_LOGITS = 8  # tokens whose router's product is ours: a kernel of cuBLAS lets none start ahead
BANDS = (64, 128, 256, 512)
"""Tokens up to which tiles are equally large: warm-up has a step in each band. More tokens are sorted, where the device can."""
BANDS_IN_REGISTERS = (*BANDS, 1024, 2048)
"""The same of weights that are decoded in registers. As measured on an H200, gpt-oss-20b's in mxfp4 and Qwen3-30B-A3B's in integers of
four bits, us a layer, 1,024 tokens 728 and 295, sorted 1,207 and 757; 2,048 tokens 1,272 and 512, sorted 1,452 and 829."""
INTEGERS = ("int4_grouped", "int8_grouped", "int4_minima", "int8_minima")
TABLES = ("nf4", "fp4")
FORMATS = ("plain", "e4m3", "mxfp4", *INTEGERS, *TABLES)
_ROUNDED = InputRounding(dtype="float8_e4m3fn")
"""Inputs that are rounded for a product over sorted rows. A power of two is their scale: e4m3 is floating point."""
_MAX_EXPERTS = 1024
_BLOCK = 32  # numbers of four bits whose bytes lie together
_CHOSEN_ROWS = 8  # of many tokens, those of a program, a warp each
_PLACED_PAIRS = 128  # of a program
_APART = 32
"""Numbers from one count of many tokens' pairs to the next, 128 bytes: increments of neighbours wait for each other.

As measured on an H200, choice and places of 16,384 tokens, 8 of 128 experts: 17.4 us, and 33.2 without."""
_DECODED_ROWS = 4  # of a program, where so many divide a matrix's
_STREAMED_PAIRS, _STREAMED_PLAIN_PAIRS = (
    0.5,
    3,
)  # of an expert on average, from which on its weights stream: of one byte, of two

_THREE_GROUPS_PAIRS = 512
"""Of an expert on average, from which on a tile of sorted rows has 192 of them, and not 128. As measured on an H200, layers of
Qwen3-30B-A3B, us, tiles of 128 and 192: 32,768 tokens 4,681 and 4,465, rounded to e4m3 3,144 and 2,934; 4,096 tokens 742 and 878, 497
and 570."""

_few_logits = Launcher(choose.few_logits_kernel)
_route = Launcher(choose.route_kernel)
_route_many = Launcher(choose.route_many_kernel)
_gate_up = Launcher(kernels.gate_up_kernel)
_down = Launcher(kernels.down_kernel)
_combine = Launcher(kernels.combine_kernel)
_place = Launcher(kernels.place_kernel)
_few_gate_up = Launcher(kernels.few_gate_up_kernel)
_few_down = Launcher(kernels.few_down_kernel)
_packed_gate_up = Launcher(packed.packed_gate_up_kernel)
_packed_down = Launcher(packed.packed_down_kernel)
_packed_few_gate_up = Launcher(packed.packed_few_gate_up_kernel)
_packed_few_down = Launcher(packed.packed_few_down_kernel)
_decode = Launcher(packed.decode_kernel)


@dataclass(frozen=True, slots=True)
class _Tile:
    """Columns of a program in the first product (of gate, and as many of up) and in the second, and numbers of a sum at a time."""

    gate_columns: int
    down_columns: int
    inner: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class _FewTile:
    """Rows of a program, and numbers of a sum at a time."""

    rows: int
    inner: int
    warps: int


def _is_copied_fast(x: Tensor) -> bool:
    """16 bytes at a time, which the compiler knows of multiples of 16 alone."""
    return x.stride(0) % 16 == 0 and x.data_ptr() % 16 == 0


class TritonMoe:
    handles = frozenset(
        [
            "has_correction",
            "scales_input",
            "limit",
            "has_bias",
            "has_router_bias",
            "counts_load",
            "weight_format",
            "group_size",
            "first_expert",
            "num_held",
            "has_copies",
        ]
    )

    @staticmethod
    def unsupported(needs: MoeNeeds) -> list[str]:
        reasons = [] if needs.dtype in DTYPES else [f"dtype {needs.dtype}"]
        if needs.experts.weight_format not in FORMATS:
            reasons.append(f"weight format {needs.experts.weight_format!r}, only {', '.join(FORMATS)}")
        group_size = needs.experts.group_size
        if group_size is not None and (group_size < 16 or group_size & (group_size - 1)):
            reasons.append(f"group_size {group_size}, only powers of two from 16")
        if needs.experts.weight_format in (*INTEGERS, *TABLES) and group_size is not None and group_size < _BLOCK:
            reasons.append(f"group_size {group_size} of codes, at least {_BLOCK}")
        if needs.experts.activation not in (*ACTIVATIONS, "swiglu_oai", "silu_clamped"):
            reasons.append(f"activation {needs.experts.activation!r}")
        if needs.routing.num_experts > _MAX_EXPERTS:
            reasons.append(f"{needs.routing.num_experts} experts, at most {_MAX_EXPERTS}")
        return reasons

    @staticmethod
    def bind(needs: MoeNeeds, tensors: MoeTensors) -> Moe:
        return BoundMoe(needs, tensors)


class BoundMoe:
    """Shapes and dtypes as `pelton.ops.moe.Moe` says."""

    def __init__(self, needs: MoeNeeds, tensors: MoeTensors) -> None:
        routing, experts = needs.routing, needs.experts
        self._tensors, self._weights = tensors, tensors.experts
        self._num_experts, self._top_k = routing.num_experts, routing.top_k
        self._num_held = routing.num_experts if experts.num_held is None else experts.num_held
        self._hidden, self._size = experts.hidden_size, experts.intermediate_size
        self._pdl = has_pdl(tensors.router.device)
        copies = tensors.copies
        self._is_whole = copies is None and self._num_held == self._num_experts
        size = routing.num_experts // routing.num_groups
        self._routing = {
            "E": routing.num_experts, "K": routing.top_k, "KB": triton.next_power_of_2(routing.top_k),
            "GROUPS": routing.num_groups, "GB": triton.next_power_of_2(routing.num_groups), "SIZE": size,
            "SB": triton.next_power_of_2(size), "TOP_GROUPS": routing.top_groups,
            "IS_TOP2": routing.group_score == "top2", "IS_SIGMOID": routing.scoring == "sigmoid",
            "IS_RENORMALIZED": routing.is_renormalized, "SCALE": float(routing.scale), "FIRST": experts.first_expert,
            "HELD": self._num_held, "IS_WHOLE": self._is_whole, "WIDTH": 0 if copies is None else copies.shape[1],
        }  # fmt: skip
        names = ("E", "K", "KB", "IS_SIGMOID", "IS_RENORMALIZED", "SCALE", "FIRST", "HELD", "IS_WHOLE", "WIDTH")
        padded = triton.next_power_of_2(routing.num_experts)
        self._many_routing = {**{name: self._routing[name] for name in names}, "EB": padded, "T": _CHOSEN_ROWS}
        self._activation = {"ACTIVATION": experts.activation, "LIMIT": experts.limit}
        self._is_plain = experts.weight_format == "plain"
        self._packed: dict[str, Any] = {}
        if not self._is_plain:
            self._packed = {"FORMAT": experts.weight_format, "G": experts.group_size or 0}
        self._common = {"SCALES_INPUT": routing.scales_input, "PDL": self._pdl}
        self._options = launch_options(self._pdl)
        self._is_wide = tensors.router.dtype == torch.float32
        self._reader: Callable[[int], Callable[..., Any] | None] | None = None
        device = tensors.router.device
        # Zeros whenever no kernel runs.
        self._counts = torch.zeros(self._num_held, dtype=torch.int32, device=device)
        self._counts_apart = torch.zeros((self._num_held, _APART), dtype=torch.int32, device=device)
        self._is_sorted = (
            is_hopper(device) and needs.dtype in ("bfloat16", "float16") and not routing.scales_input
            and experts.activation in (*ACTIVATIONS, "swiglu_oai")
            and experts.hidden_size % hopper.STEP == experts.intermediate_size % 8 == 0
            and (not self._is_plain or alignment(*tensors.experts.values()) == 0)
        )  # fmt: skip
        self._splits_rows = (
            self._is_sorted and experts.weight_format == "e4m3" and not experts.has_bias and experts.activation in ACTIVATIONS
            and (experts.group_size is None or hopper.takes_blocks(experts.group_size, experts.group_rows))
            and hopper.can_split(experts.hidden_size, experts.intermediate_size) and alignment(*tensors.experts.values()) == 0
        )  # fmt: skip
        self._rounds_rows = self._splits_rows and experts.inputs == _ROUNDED
        self._is_streamed = (
            is_hopper(device) and needs.dtype in ("bfloat16", "float16") and not routing.scales_input
            and not experts.has_bias and experts.activation in ACTIVATIONS and experts.weight_format in ("plain", "e4m3")
            and (experts.group_size is None or streamed.takes_blocks(experts.group_size, experts.group_rows))
            and alignment(*tensors.experts.values()) == 0
        )  # fmt: skip
        is_decoded_in_registers = (
            is_hopper(device) and needs.dtype == "bfloat16" and not routing.scales_input
            and experts.activation in (*ACTIVATIONS, "swiglu_oai") and alignment(*tensors.experts.values()) == 0
        )  # fmt: skip
        self._is_mxfp4 = (
            is_decoded_in_registers
            and experts.weight_format == "mxfp4"
            and hopper_mxfp4.can_multiply(experts.hidden_size, experts.intermediate_size)
        )
        self._is_int4 = (
            is_decoded_in_registers
            and experts.weight_format == "int4_grouped"
            and experts.activation == "silu"
            and not experts.has_bias  # others were not run on a device
            and hopper_int4.can_multiply(experts.hidden_size, experts.intermediate_size, experts.group_size)
        )
        self._adds_or_clamps = experts.has_bias or experts.activation not in ACTIVATIONS
        self._bands = BANDS_IN_REGISTERS if self._is_mxfp4 or self._is_int4 else BANDS

    def read_by(self, reader: Callable[[int], Callable[..., Any] | None] | None) -> None:
        """See `Moe`: a reader with an attribute `takes_unsummed = True` is given `UnsummedRows` where sums are a kernel of their own."""
        self._reader = reader

    def __call__(self, x: Tensor, slot_mapping: Tensor) -> Tensor:
        num_tokens = x.shape[0]
        if num_tokens == 0:
            return torch.empty_like(x)
        x = inner_contiguous(x)
        unsorted = self._bands if _is_copied_fast(x) else BANDS
        if num_tokens > unsorted[-1] and self._is_sorted and 2 * num_tokens * x.stride(0) < 2**31:
            x = x if _is_copied_fast(x) else x.clone(memory_format=torch.contiguous_format)
            return self._sorted(x, slot_mapping)
        return self.routed(x, slot_mapping, self._logits(x))

    def routed(self, x: Tensor, slots: Tensor, logits: Tensor) -> Tensor:
        """Return what the experts chosen by logits [T, E] make of x."""
        num_tokens = x.shape[0]
        # In mxfp4, gpt-oss-20b's experts on an H200: 2 tokens 77 us and 81 by output rows, 3 tokens 85 and 116, 8 tokens 129 and 294.
        # In integers of four bits, Qwen3-30B-A3B's: 2 tokens 32 us and 41, 4 tokens 39 and 73.
        if num_tokens * self._top_k <= FEW_PAIRS and (num_tokens == 1 or not (self._is_mxfp4 or self._is_int4)):
            return self._few(x, *self.choose(x, slots, logits))
        order = torch.empty((self._num_held, num_tokens), dtype=torch.int32, device=x.device)
        return self._many(x, *self.choose(x, slots, logits, counts=self._counts, order=order), order)

    def _key(self, x: Tensor, *more: Any) -> tuple[Any, ...]:
        bias = self._weights.get("down_bias")
        aligned = alignment(x, *self._weights.values())
        return (x.dtype, x.device, x.stride(0), self._hidden, self._size, aligned, bias is None or bias.dtype, *more)

    def _matrix(self, name: str) -> tuple[Tensor | None, ...]:
        """Arguments of a kernel: the weights, their scales where they are packed, and the bias."""
        weights = self._weights
        scale = () if self._is_plain else (weights[f"{name}_scale"],)
        return (weights[name], *scale, weights.get(f"{name}_bias"))

    def _read_matrix(self, name: str, x: Tensor, *, is_decoded: bool) -> tuple[Tensor | None, ...]:
        """As `_matrix`, with weights that are decoded first."""
        return (self._decoded(name, x), self._weights.get(f"{name}_bias")) if is_decoded else self._matrix(name)

    def _logits(self, x: Tensor) -> Tensor:
        """[T, E] float32"""
        router = self._tensors.router
        if x.shape[0] <= FEW_LOGITS:
            return self._few_logits(x)
        if x.dtype == torch.float32 or self._is_wide or x.device.type != "cuda":
            return torch.mm(x.float(), router.float().t())
        return torch.mm(x, router.t(), out_dtype=torch.float32)

    def _few_logits(self, x: Tensor) -> Tensor:
        router, hidden, rows = self._tensors.router, self._hidden, 2
        logits = torch.empty((x.shape[0], self._num_experts), dtype=torch.float32, device=x.device)
        block = min(triton.next_power_of_2(hidden), 1024)
        constants = {
            "E": self._num_experts, "H": hidden, "R": rows, "BK": block, "AHEAD": min(triton.cdiv(hidden, block), 4),
            "PDL": self._pdl,
        }  # fmt: skip
        _few_logits(
            (x.dtype, router.dtype, x.device, x.stride(0), alignment(x, router), *constants.values()),
            (triton.cdiv(self._num_experts, rows), x.shape[0]), (x, router, logits, x.stride(0)), constants,
            num_warps=4, **self._options,
        )  # fmt: skip
        return logits

    def choose(
        self, x: Tensor, slots: Tensor, logits: Tensor, *, ranks: Tensor | None = None, counts: Tensor | None = None,
        order: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Experts [T, k] int32 and their weights [T, k] float32, by logits [T, E] float32.

        ranks [T, k] int32: is given each pair's place among its expert's; counts [experts held] int32, with ranks [experts held, _APART],
        zeros: is given how many there are; order [experts held, T] int32: is given each expert's pairs, in any order."""
        num_tokens, tensors = x.shape[0], self._tensors
        experts = torch.empty((num_tokens, self._top_k), dtype=torch.int32, device=x.device)
        shares = torch.empty((num_tokens, self._top_k), dtype=torch.float32, device=x.device)
        is_many = num_tokens > BANDS[-1] and self._routing["GROUPS"] == 1
        constants, rows = (self._many_routing, _CHOSEN_ROWS) if is_many else (self._routing, 1)
        constants = {**constants, "STRIDE": 1 if ranks is None else _APART, "PDL": self._pdl}
        (_route_many if is_many else _route)(
            (x.device, tuple(constants.values()), tensors.router_bias is None or tensors.router_bias.dtype,
             tensors.correction is None, tensors.copies is None, tensors.load is None, ranks is None, order is None, alignment(slots)),
            (triton.cdiv(num_tokens, rows),),
            (logits, tensors.router_bias, tensors.correction, tensors.copies, slots, experts, shares, tensors.load,
             counts, ranks, order, num_tokens),
            constants, num_warps=_CHOSEN_ROWS if is_many else 1 if self._num_experts <= 128 else 4, **self._options,
        )  # fmt: skip
        return experts, shares

    def _few(self, x: Tensor, experts: Tensor, shares: Tensor) -> Tensor:
        hidden, size = self._hidden, self._size
        num_pairs = experts.numel()
        inner = torch.empty((num_pairs, size), dtype=x.dtype, device=x.device)
        out = torch.empty((x.shape[0], hidden), dtype=x.dtype, device=x.device)
        sizes = {"E": self._num_held, "H": hidden, "SIZE": size, "K": self._top_k}
        first, second = self._few_tiles()
        gate = {
            **sizes, "R": first.rows, "BK": min(triton.next_power_of_2(hidden), first.inner), **self._packed, **self._activation,
            **self._common,
        }  # fmt: skip
        (_few_gate_up if self._is_plain else _packed_few_gate_up)(
            self._key(x, *gate.values()), (triton.cdiv(size, first.rows), num_pairs),
            (x, *self._matrix("gate_up"), experts, shares, inner, x.stride(0)), gate, num_warps=first.warps, **self._options,
        )  # fmt: skip
        down = {
            **sizes, "R": second.rows,
            "BK": min(triton.next_power_of_2(size), second.inner), **self._packed, **self._common,
        }  # fmt: skip
        if not self._is_plain:
            down["KB"] = triton.next_power_of_2(self._top_k)
        (_few_down if self._is_plain else _packed_few_down)(
            self._key(x, *down.values()), (triton.cdiv(hidden, second.rows), x.shape[0]),
            (inner, *self._matrix("down"), experts, shares, out), down, num_warps=second.warps, **self._options,
        )  # fmt: skip
        return out

    def _few_tiles(self) -> tuple[_FewTile, _FewTile]:
        """As measured on an H200, one token through a layer: 26.1 us with Qwen3-30B-A3B's experts, where two rows and two warps of the
        second product took 29.5; 18.8 in e4m3, where 1,024 numbers of the second product at a time took 20.9, and 18.6 with a scale for
        each block of 128, where that took 19.8; in mxfp4 23.5, where fewer warps for as many rows or half of them took 22.9 and 35.5; 23.1
        in 4 bits in groups, where half of the numbers and of the warps took 35.1."""
        if self._is_plain:
            return _FewTile(2, 1024, 4), _FewTile(1, 256, 1)
        if self._packed["FORMAT"] in (*INTEGERS, *TABLES):
            return _FewTile(4, 2048, 4), _FewTile(4, 1024, 4)
        if self._packed["FORMAT"] == "mxfp4":
            return _FewTile(4, 1024, 2), _FewTile(2, 1024, 4)
        return _FewTile(2, 2048, 4), _FewTile(2, 256, 4)

    def _many(self, x: Tensor, experts: Tensor, shares: Tensor, order: Tensor) -> Tensor:
        num_tokens, num_pairs = x.shape[0], experts.numel()
        block_rows = self._tile_rows(num_tokens)
        inner = torch.empty((num_pairs, self._size), dtype=x.dtype, device=x.device)
        pairs = torch.empty((num_pairs, self._hidden), dtype=x.dtype, device=x.device)
        is_copied_fast = _is_copied_fast(x)
        tilings = self._streams(num_pairs, block_rows) if self._is_streamed and is_copied_fast else None
        activation, weights, chosen = str(self._activation["ACTIVATION"]), self._weights, (order, self._counts)
        if tilings is not None:
            first = weights["gate_up"], weights.get("gate_up_scale"), shares
            second = weights["down"], weights.get("down_scale"), shares
            streamed.experts_product(x, *first, inner, *chosen, self._top_k, tilings[0], activation)
            streamed.experts_product(inner, *second, pairs, *chosen, 1, tilings[1])
        elif (self._is_mxfp4 or self._is_int4) and is_copied_fast and num_tokens <= self._bands[-1]:
            gated = activation, self._activation["LIMIT"]
            if self._is_mxfp4:
                multiply, rows = hopper_mxfp4.experts_product, hopper_mxfp4.reordered(x)
            else:
                multiply, rows = hopper_int4.experts_product, hopper_int4.reordered(x, self._packed["G"])
            multiply(rows, *self._matrix("gate_up"), shares, inner, *chosen, self._top_k, block_rows, *gated)
            multiply(inner, *self._matrix("down"), shares, pairs, *chosen, 1, block_rows)
        else:
            self._multiply(x, shares, order, inner, pairs, block_rows)
        return self._combined(x, pairs, experts, counts=self._counts)

    def _streams(self, num_pairs: int, block_rows: int) -> tuple[streamed.Tiling, streamed.Tiling] | None:
        """Both products' work by programs that stream; of fewer pairs many experts' weights are not read at all.

        As measured on an H200, Qwen3-30B-A3B's experts, us, streamed and not: in bfloat16 32 tokens 257.2 and 254.2, 40 265.4 and 265.5,
        64 282.2 and 283.2, 128 286.9 and 290.8, 256 297.8 and 303.9; in e4m3 9 tokens 89.0 and 93.8, 24 132.1 and 144.2."""
        least = _STREAMED_PLAIN_PAIRS if self._is_plain else _STREAMED_PAIRS
        if num_pairs < least * self._num_experts:
            return None
        itemsize = self._weights["gate_up"].element_size()
        return streamed.choose_tilings(self._num_held, self._hidden, self._size, block_rows, itemsize)

    def _multiply(
        self, x: Tensor, shares: Tensor, order: Tensor, inner: Tensor, pairs: Tensor, block_rows: int
    ) -> None:
        """Both products in tiles of `block_rows` pairs of one expert: gate's and up's into inner, weighted ones into pairs."""
        hidden, size, top_k = self._hidden, self._size, self._top_k
        num_tokens, num_pairs = x.shape[0], inner.shape[0]
        num_tiles = self._num_held + num_pairs // block_rows  # each expert's first, and further ones
        pairs_of = order, self._counts, num_tokens
        sizes = {"E": self._num_held, "EB": triton.next_power_of_2(self._num_held), "H": hidden, "SIZE": size}
        # A product of many tokens would decode each weight once a tile.
        is_decoded = not self._is_plain and num_tokens > BANDS[-1]
        is_plain = self._is_plain or is_decoded
        tile = self._tile(block_rows, x.element_size()) if is_plain else self._packed_tile(block_rows, x)
        packing = {} if is_plain else self._packed
        common = {"KEPT": kept_policy(num_tokens), **self._common}
        gate = {
            **sizes, "K": top_k, "BM": block_rows, "BN": tile.gate_columns, "BK": tile.inner,
            **packing, **self._activation, **common,
        }  # fmt: skip
        (_gate_up if is_plain else _packed_gate_up)(
            self._key(x, *gate.values()), (triton.cdiv(size, tile.gate_columns), num_tiles),
            (x, *self._read_matrix("gate_up", x, is_decoded=is_decoded), shares, inner, *pairs_of, x.stride(0)),
            gate, num_warps=tile.warps, num_stages=tile.stages, **self._options,
        )  # fmt: skip
        down = {
            **sizes, "BM": block_rows, "BN": tile.down_columns, "BK": tile.inner, **packing,
            **common,
        }  # fmt: skip
        (_down if is_plain else _packed_down)(
            self._key(x, *down.values()), (triton.cdiv(hidden, tile.down_columns), num_tiles),
            (inner, *self._read_matrix("down", x, is_decoded=is_decoded), shares, pairs, *pairs_of),
            down, num_warps=tile.warps, num_stages=tile.stages, **self._options,
        )  # fmt: skip

    def _combined(
        self, x: Tensor, pairs: Tensor, experts: Tensor, places: Tensor | None = None, shares: Tensor | None = None,
        counts: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        num_tokens, hidden = x.shape[0], self._hidden
        stride = 1 if places is None else _APART
        if self._reader is not None and getattr(self._reader(num_tokens), "takes_unsummed", False):
            return UnsummedRows(
                pairs,
                experts,
                places,
                shares,
                counts,
                num_held=self._num_held,
                count_stride=stride,
                is_whole=self._is_whole,
            )  # type: ignore[return-value]
        out = torch.empty((num_tokens, hidden), dtype=x.dtype, device=x.device)
        block = min(triton.next_power_of_2(hidden), 1024)
        constants = {
            "H": hidden, "E": self._num_held, "EB": triton.next_power_of_2(self._num_held), "K": self._top_k, "BLOCK": block,
            "STRIDE": stride, "IS_WHOLE": self._is_whole, "KEPT": kept_policy(num_tokens), "PDL": self._pdl,
        }  # fmt: skip
        _combine(
            self._key(x, places is None, *constants.values()), (num_tokens, triton.cdiv(hidden, block)),
            (pairs, experts, shares, places, counts, out),
            constants, num_warps=4, **self._options,
        )  # fmt: skip
        return out

    def _sorted(self, x: Tensor, slots: Tensor) -> Tensor:
        num_held, num_tokens, num_pairs = self._num_held, x.shape[0], x.shape[0] * self._top_k
        product = self._product_of_sorted(num_pairs)
        rows = product.ROWS
        ranks = torch.empty((num_tokens, self._top_k), dtype=torch.int32, device=x.device)
        places = torch.empty_like(ranks)
        counts = self._counts_apart
        experts, shares = self.choose(x, slots, self._logits(x), ranks=ranks, counts=counts)
        most_tiles = triton.cdiv(num_pairs, rows) + num_held
        source = torch.empty(most_tiles * rows, dtype=torch.int32, device=x.device)
        tile_expert, tile_rows = torch.empty((2, most_tiles), dtype=torch.int32, device=x.device).unbind()
        num_tiles = torch.empty(1, dtype=torch.int32, device=x.device)
        constants = {
            "E": num_held, "EB": triton.next_power_of_2(num_held), "K": self._top_k, "BM": rows, "BLOCK": _PLACED_PAIRS,
            "STRIDE": _APART, "PDL": self._pdl,
        }  # fmt: skip
        _place(
            (x.device, *constants.values()), (max(triton.cdiv(num_pairs, _PLACED_PAIRS), num_held),),
            (experts, ranks, counts, places, source, tile_expert, tile_rows, num_tiles, num_pairs),
            constants, num_warps=4, **self._options,
        )  # fmt: skip
        activation = str(self._activation["ACTIVATION"])
        tiles = tile_expert, tile_rows, num_tiles
        if self._splits_rows:
            weights, is_rounded = self._weights, self._rounds_rows
            first, second = weights["gate_up_scale"], weights["down_scale"]
            x_rows = split(x, is_rounded=is_rounded)
            inner = product.experts_matmul(x_rows, weights["gate_up"], *tiles, activation, source, first)
            inner_rows = split(inner, num_tiles, rows, is_rounded=is_rounded)
            pairs = product.experts_matmul(inner_rows, weights["down"], *tiles, weight_scale=second)
        else:
            first_more: dict[str, Any] = {}
            second_more: dict[str, Any] = {}
            if self._adds_or_clamps:
                first_more = {"bias": self._weights.get("gate_up_bias"), "limit": self._activation["LIMIT"]}
                second_more = {"bias": self._weights.get("down_bias")}
            inner = product.experts_matmul(x, self._decoded("gate_up", x), *tiles, activation, source, **first_more)
            pairs = product.experts_matmul(inner, self._decoded("down", x), *tiles, **second_more)
        return self._combined(x, pairs, experts, places, shares, counts)

    def _product_of_sorted(self, num_pairs: int) -> ModuleType:
        """Return the file of the product over sorted rows: its tiles have so many ROWS."""
        has_three_groups = not self._splits_rows or (self._rounds_rows and self._packed["G"] == 0)
        is_many = num_pairs >= _THREE_GROUPS_PAIRS * self._num_experts
        return hopper_three_groups if has_three_groups and is_many and not self._adds_or_clamps else hopper

    def _decoded(self, name: str, like: Tensor) -> Tensor:
        """The weights [E, rows, columns] in `like`'s dtype."""
        weight = self._weights[name]
        if self._is_plain:
            return weight
        num_rows, width = weight.shape[1], self._hidden if name == "gate_up" else self._size
        out = torch.empty((self._num_held, num_rows, width), dtype=like.dtype, device=like.device)
        rows = _DECODED_ROWS if num_rows % _DECODED_ROWS == 0 else 1
        constants = {
            "WIDTH": width, "R": rows, "BLOCK": min(max(triton.next_power_of_2(width), packed.MX_BLOCK.value), 1024), **self._packed,
            "PDL": self._pdl,
        }  # fmt: skip
        _decode(
            (like.dtype, like.device, alignment(weight, self._weights[f"{name}_scale"]), *constants.values()),
            (self._num_held * num_rows // rows,), (weight, self._weights[f"{name}_scale"], out), constants,
            num_warps=4, **self._options,
        )  # fmt: skip
        return out

    @staticmethod
    def _tile(block_rows: int, element_size: int) -> _Tile:
        """As measured on an H200 with Qwen3-30B-A3B's experts: 8,192 tokens take 1.25 ms, with half as many columns 1.58 ms."""
        if element_size == 4:
            return _Tile(32, 64, 32, warps=4, stages=2)
        if block_rows <= 16:
            return _Tile(32, 64, 128, warps=4, stages=4)
        if block_rows <= 32:
            return _Tile(64, 64, 128, warps=4, stages=3)
        if block_rows < 128:
            return _Tile(64, 128, 64, warps=4, stages=4)
        return _Tile(128, 256, 64, warps=8, stages=3)

    def _packed_tile(self, block_rows: int, x: Tensor) -> _Tile:
        is_split = self._packed["FORMAT"] in ("int4_minima", "int8_minima", *TABLES)  # a step may have several groups
        group_size = 128 if is_split else int(self._packed["G"]) or 128
        if x.element_size() == 4:
            return _Tile(32, 32, min(64, group_size), warps=4, stages=2)
        if block_rows <= 16 and self._packed["FORMAT"] == "e4m3" and not self._packed["G"]:
            # 128 tokens of Qwen3-30B-A3B's experts 175 us and not 184; 256, in tiles of 32 rows, 242 and not 225.
            return _Tile(64, 64, 256, warps=4, stages=3)
        if block_rows < 128:
            return _Tile(64, 64, min(128, group_size), warps=4, stages=4)
        return _Tile(128, 128, min(64, group_size), warps=8, stages=3)

    def _tile_rows(self, num_tokens: int) -> int:
        """Rows of a tile: twice the pairs that an expert has on average of the band's last number of tokens.

        Experts get unequal shares, and a second tile reads the weights again: with Qwen3-30B-A3B's on an H200, 256 tokens take 428 us in
        tiles of 16 rows and 327 in tiles of 32; 128 tokens 301 and 319; 512 tokens 472 in tiles of 32 and 344 in tiles of 64."""
        last = next((band for band in self._bands if num_tokens <= band), 8 * BANDS[-1])
        return min(max(triton.next_power_of_2(2 * last * self._top_k // self._num_experts), 16), 128)
