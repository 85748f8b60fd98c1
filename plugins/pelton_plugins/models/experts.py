"""Layers of experts: a router, the experts, and those that every token takes beside them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn

from pelton.errors import ConfigError
from pelton.layers.linear import ACTIVATION_NAMES, LinearModule, RowParallelLinear, merged_shards
from pelton.layers.norm import RMSNorm
from pelton.logging import get_logger
from pelton.ops.interface import (
    Gated,
    GatedNeeds,
    GatedTensors,
    InputRounding,
)
from pelton.ops.moe import (
    AddNormMoe,
    AddNormMoeNeeds,
    AddNormMoeTensors,
    ExpertsSpec,
    Moe,
    MoeNeeds,
    MoeTensors,
    RoutingSpec,
)
from pelton.ops.packed_blocks import kinds_of, panels_shape
from pelton.ops.packed_blocks import weight_format as block_format
from pelton.quantization.interface import LinearShard
from pelton.quantization.plain import PlainWeights, decoded_weights
from pelton_plugins.models.settings import NAME, ModelSettings

if TYPE_CHECKING:
    from torch import Tensor

    from pelton.attention.metadata import ForwardBatch
    from pelton.model.build import BuildConfig
    from pelton.ops.packed_blocks import BlockKind
    from pelton.parallel.communicator import Communicator
    from pelton.parallel.context import ParallelContext


logger = get_logger(__name__)


class GatedMLP(LinearModule):
    """gate, up and down of an MLP whose input is normed already: experts that every token takes."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: str,
        config: BuildConfig,
        prefix: str,
        merged: str | None = None,
        down: str = "down_proj",
    ) -> None:
        """merged: the checkpoint's tensor with gate and up, where it is one; down: the name of the last product."""
        width = config.parallel.share(intermediate_size, f"intermediate size of {prefix}")
        rows = (config.parallel.rank * width, (config.parallel.rank + 1) * width)
        parts = [(name, intermediate_size, rows) for name in ("gate_proj", "up_proj")]
        shards = merged_shards(prefix, merged, parts, hidden_size)
        weights = config.create_weights(shards)
        super().__init__(weights)
        self._bind_bare(config, shards, weights)
        gated = GatedNeeds(dtype=config.dtype_name, size=width, activation=_activation(activation))
        self.gated: Gated = config.ops.bind("gated", gated, GatedTensors(config.device))
        self.down_proj = RowParallelLinear(intermediate_size, hidden_size, config=config, prefix=f"{prefix}.{down}")

    def forward(self, x: Tensor) -> Tensor:
        """[T, H] -> [T, H], partial over ranks."""
        down: Tensor = self.down_proj(self.gated(self._bare_product(x)))
        return down


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """How a checkpoint calls a layer's tensors, behind its prefix."""

    router: str = "gate"
    experts: str = "experts"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    correction: str = "gate.e_score_correction_bias"
    correction_is_row: bool = False  # it is [1, E]


PACKED = {
    "e4m3": (torch.float8_e4m3fn, torch.float32, 1),
    "int4_grouped": (torch.uint8, torch.int32, 2), "int4_minima": (torch.uint8, torch.int32, 2),
    "nf4": (torch.uint8, torch.float32, 2), "fp4": (torch.uint8, torch.float32, 2),
    "int8_grouped": (torch.uint8, torch.int32, 1), "int8_minima": (torch.uint8, torch.int32, 1),
}  # fmt: skip
"""By weight format: dtype of the weights and of their scales, numbers in one of the former."""
MakeExperts = Callable[["BuildConfig", str, ExpertsSpec], "dict[str, nn.Parameter]"]
"""From the prefix of a layer's experts to their tensors by name, as `ExpertsSpec` says, of this rank."""


class PackedExperts(Protocol):
    """`experts` of a quantization method which can keep the matrices of experts in its own form. Optional: `group_rows(shard)`, how many
    rows have the same scales, and `inputs(shard)`, how inputs of the matrix may be rounded (`ExpertsSpec`)."""

    def form(self, shard: LinearShard) -> tuple[str, int | None] | None:
        """Return `weight_format` and `group_size` of `ExpertsSpec` for this matrix; None where it can only be decoded."""
        ...

    def expect(self, config: BuildConfig, shard: LinearShard, weight: Tensor, scale: Tensor) -> None:
        """Tell `config.weights` what fills this rank's part of the matrix [rows, columns] and its scales [rows, groups]."""
        ...


class ExpertBlocks(Protocol):
    """The same where it can keep them in blocks as well (`pelton.ops.packed_blocks`), which the op for CPUs reads."""

    def block(self, shard: LinearShard) -> BlockKind | None:
        """Return the kind of block of this matrix; None where it can only be decoded."""
        ...

    def expect_blocks(self, config: BuildConfig, shard: LinearShard, panels: Tensor) -> None:
        """Tell `config.weights` what fills this rank's part of the matrix."""
        ...


def is_for_cpu(config: BuildConfig) -> bool:
    return (config.device_type or config.device.type) == "cpu"


def keeps_packed(config: BuildConfig) -> bool:
    """Return whether experts stay as a checkpoint has them, where an op reads that. On a CPU they become blocks, or are decoded: the op in
    C reads those and the model's dtype, and torch's decodes anew for each step."""
    return not is_for_cpu(config) or decoded_weights(config) is None


def keeps_blocks(config: BuildConfig) -> bool:
    """Return whether experts are kept in blocks, where they can be: for the op in C."""
    return is_for_cpu(config)


class SparseMoe(nn.Module):
    """The norm, the router and its experts (`add_norm_moe`), and what every token takes beside them."""

    expert_load: Tensor | None = None
    """[E], with copies [P], int64, with `count_expert_load`: the tokens that the expert at each place was given so far, of this rank's
    places."""
    group_size: int
    """Experts among which a router chooses groups first; all, where it does not."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        routing: RoutingSpec,
        activation: str,
        norm: RMSNorm | None,
        config: BuildConfig,
        prefix: str,
        names: ExpertNames = ExpertNames(),
        has_bias: bool = False,
        limit: float | None = None,
        make_experts: MakeExperts | None = None,
        weight_format: str = "plain",
        multiple: int = 1,
        shared: GatedMLP | None = None,
        shared_gate: str | None = None,
        router_dtype: torch.dtype | None = None,
    ) -> None:
        """norm: None where what comes in is normed already, with its residual beside it. prefix: of the MLP in the checkpoint. has_bias,
        limit: as in `ExpertsSpec`; a router has a bias where its experts have.
        make_experts: allocates the experts' tensors and says how a checkpoint fills them, where it is not one tensor a matrix;
        weight_format: of what it allocates; multiple: of which each rank's part of the intermediate size is one, so that `make_experts`
        has to fill up what the last ranks lack with zeros.
        shared: takes every token; shared_gate: the name of the matrix [1, H] whose sigmoid it is multiplied by, if any.
        router_dtype: the model's or float32; the model's when None."""
        super().__init__()
        parallel = config.parallel
        first, num_held, width = 0, None, intermediate_size
        num_places = routing.num_experts + _num_redundant(config, routing.num_experts, prefix)
        if config.has_whole_experts:
            first, num_held = _held(parallel, num_places, prefix)
        else:
            width = -(-intermediate_size // (parallel.size * multiple)) * multiple
            if multiple == 1:
                width = parallel.share(intermediate_size, f"intermediate size of {prefix}'s experts")
        group_size, group_rows, inputs = None, 1, None
        if make_experts is None:
            some = f"{prefix}.{names.experts}.{first % routing.num_experts}"
            shards = _shards(config, some, hidden_size, intermediate_size, width, names)
            weight_format, group_size = _form(config, list(shards.values()))
            group_rows = _group_rows(config, list(shards.values())) if group_size else 1
            inputs = _inputs(config, list(shards.values())) if weight_format != "plain" else None
        spec = ExpertsSpec(
            hidden_size=hidden_size, intermediate_size=width, activation=_activation(activation), limit=limit,
            has_bias=has_bias, weight_format=weight_format, group_size=group_size, group_rows=group_rows, inputs=inputs,
            first_expert=first, num_held=num_held,
        )  # fmt: skip
        self.routing, self.norm, self.shared = routing, norm, shared
        self.placement = [place % routing.num_experts for place in range(num_places)]
        self.copies: Tensor | None = None
        self.group_size = routing.num_experts // routing.num_groups
        if num_places > routing.num_experts:
            table = copies_of(self.placement)
            self.copies, self.group_size = config.empty(*table.shape, dtype=table.dtype), num_places
            self.copies.copy_(table)
        self.places = places_of_ranks(parallel, num_places) if config.has_whole_experts else []
        self.has_all = num_held is None
        self.router = _parameter(config, routing.num_experts, hidden_size, dtype=router_dtype)
        config.weights.expect(f"{prefix}.{names.router}.weight", tuple(self.router.shape), self.router)
        self.router_bias: nn.Parameter | None = None
        if has_bias:
            self.router_bias = _parameter(config, routing.num_experts)
            config.weights.expect(f"{prefix}.{names.router}.bias", (routing.num_experts,), self.router_bias)
        self.correction: nn.Parameter | None = None
        if routing.has_correction:
            self.correction = _parameter(config, routing.num_experts, dtype=torch.float32)
            stored = self.correction.data[None] if names.correction_is_row else self.correction
            config.weights.expect(f"{prefix}.{names.correction}", tuple(stored.shape), stored)
        self.shared_gate: nn.Parameter | None = None
        if shared_gate is not None:
            self.shared_gate = _parameter(config, 1, hidden_size)
            config.weights.expect(f"{prefix}.{shared_gate}.weight", (1, hidden_size), self.shared_gate)
        _check_method(config, prefix, spec)
        if make_experts is None:
            made = _stored_experts(
                config, f"{prefix}.{names.experts}", spec, intermediate_size, routing.num_experts, names
            )
        else:
            made = make_experts(config, f"{prefix}.{names.experts}", spec)
        self.experts = nn.ParameterDict(made)
        moe = MoeNeeds(
            dtype=config.dtype_name, routing=routing, experts=spec, max_num_tokens=config.max_num_batched_tokens,
            has_router_bias=has_bias, counts_load=_counts_load(config),
            num_engines=1 if parallel.experts is None else parallel.experts.size, has_copies=self.copies is not None,
        )  # fmt: skip
        if moe.counts_load:
            self.expert_load = config.empty(num_places, dtype=torch.int64).zero_()
        tensors = MoeTensors(
            self.router, dict(self.experts.items()), self.router_bias, self.correction, self.expert_load, parallel.experts,
            self.copies, held_by=self.places[parallel.rank :: parallel.size],
        )  # fmt: skip
        self.moe: Moe | None = None
        self.add_norm_moe: AddNormMoe | None = None
        if norm is None:
            self.moe = config.ops.bind("moe", moe, tensors)
            return
        self.add_norm_moe = config.ops.bind(
            "add_norm_moe", AddNormMoeNeeds(dtype=config.dtype_name, norm=norm.spec, tp_size=parallel.size, moe=moe),
            AddNormMoeTensors(norm.weight, tensors, None, config.all_reduce(hidden_size)),
        )  # fmt: skip

    def forward(
        self, hidden: Tensor, residual: Tensor | None, batch: ForwardBatch, tokens: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """-> (the layer's bare output [T, H], residual [T, H]). tokens [T] int64: which of the step's tokens the rows are; None: all."""
        result, _, residual = self.with_input(hidden, residual, batch, tokens)
        return result, residual

    def with_input(
        self, hidden: Tensor, residual: Tensor | None, batch: ForwardBatch, tokens: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the same, with what the experts read, [T, H], between the two."""
        slots = batch.slot_mappings[0] if batch.slot_mappings else batch.positions  # the memory profile has no slots
        if tokens is not None:
            slots = slots.index_select(0, tokens)
        if self.add_norm_moe is None:
            assert self.moe is not None and residual is not None
            result, x = self.moe(hidden, slots), hidden
        else:
            result, x, residual = self.add_norm_moe(hidden, residual, slots)
        if self.expert_load is not None and not batch.slot_mappings:
            self.expert_load.zero_()  # nobody's tokens
        if self.shared is not None:
            always = self.shared(x)
            if self.shared_gate is not None:
                always = torch.sigmoid(nn.functional.linear(x, self.shared_gate)) * always
            result = result + always
        return result, x, residual

    def read_by(self, reader: Callable[[int], Callable[..., object] | None] | None) -> None:
        """Say which op, by the number of tokens, alone reads the result (`Moe`), unless something is done to it first; None: anybody."""
        if self.shared is None and self.add_norm_moe is not None and hasattr(self.add_norm_moe, "read_by"):
            self.add_norm_moe.read_by(reader)

    def place_experts(self, placement: list[int], ranks: Communicator) -> None:
        """Bring experts to other places, on all ranks at once, between two steps: `placement[i]` is the expert that place i gets. Where
        there are no copies, rows of the router follow, so that the op knows nothing of it."""
        owner = [rank for rank, places in enumerate(self.places) for _ in places]
        source = _sources(self.placement, placement, owner)
        mine, here = ranks.rank, self.places[ranks.rank]
        sent = [[source[p] - here.start for p in places if owner[source[p]] == mine] for places in self.places]
        got = [[p - here.start for p in here if owner[source[p]] == rank] for rank in range(ranks.size)]
        rows, targets = ([place for part in parts for place in part] for parts in (sent, got))
        for tensor in self.experts.values():
            part = (
                tensor.data[rows].reshape(len(rows), -1).view(torch.uint8)
            )  # as bytes: kernels have an order of their own
            found = ranks.all_to_all(part, [len(one) for one in sent], [len(one) for one in got])
            tensor.data[targets] = found.view(tensor.dtype).view(len(targets), *tensor.shape[1:])
        if self.copies is not None:
            self.copies.copy_(copies_of(placement))
        for moved in (self.router, self.router_bias, self.correction) if self.copies is None else ():
            if moved is not None:
                moved.data.copy_(moved.data[source])
        if self.expert_load is not None:
            totals = [0] * self.routing.num_experts
            for expert, count in zip(self.placement, ranks.all_reduce(self.expert_load.clone()).tolist(), strict=True):
                totals[expert] += count
            self.expert_load.zero_()
            for place in here:  # the first of an expert's places has it all
                if placement.index(placement[place]) == place:
                    self.expert_load[place] = totals[placement[place]]
        self.placement = placement


def copies_of(placement: list[int]) -> Tensor:
    """Return `MoeTensors.copies` of the expert at each place. Experts begin with different ones of their places, so that steps of few
    tokens do not all go to one rank."""
    num_experts = max(placement) + 1
    table = torch.zeros(num_experts, 2 + len(placement) - num_experts, dtype=torch.int32)
    for expert in range(num_experts):
        places = [place for place, other in enumerate(placement) if other == expert]
        begin = expert % len(places)
        table[expert, 0] = len(places)
        table[expert, 1 : 1 + len(places)] = torch.tensor(places[begin:] + places[:begin])
    return table


def _sources(old: list[int], new: list[int], owner: list[int]) -> list[int]:
    """Return the place whose expert each place gets: itself, else one of its rank, else any."""
    places: dict[int, list[int]] = {}
    for place, expert in enumerate(old):
        places.setdefault(expert, []).append(place)
    found = []
    for place, expert in enumerate(new):
        near = [other for other in places[expert] if owner[other] == owner[place]]
        found.append(place if old[place] == expert else (near or places[expert])[0])
    return found


def _counts_load(config: BuildConfig) -> bool:
    is_balanced = config.engine_config is not None and config.engine_config.eplb.enable_eplb
    return is_balanced or config.plugin_settings(NAME, ModelSettings).count_expert_load


def _num_redundant(config: BuildConfig, num_experts: int, prefix: str) -> int:
    """Return how many places there are beyond one for each expert."""
    if config.engine_config is None or not config.has_whole_experts:
        return 0
    count = config.engine_config.eplb.num_redundant_experts
    if count > num_experts:
        raise ConfigError(
            f"eplb_config.num_redundant_experts is {count}, and {prefix} has {num_experts} experts. Use at most {num_experts}."
        )
    return count


def _check_method(config: BuildConfig, prefix: str, spec: ExpertsSpec) -> None:
    if spec.weight_format == "plain" and decoded_weights(config) is None:
        raise ConfigError(
            f"quantization is {config.quantization.name!r}, and {prefix} has experts, which this version keeps in the model's "
            "dtype alone. Leave quantization unset, or take a checkpoint that is not quantized."
        )
    if config.adapters is not None:
        config.adapters.refuse(prefix, "it belongs to a layer of experts")


def _shards(
    config: BuildConfig, prefix: str, hidden: int, intermediate_size: int, width: int, names: ExpertNames
) -> dict[str, LinearShard]:
    """Return one expert's matrices: this rank's rows of gate and up, columns of down."""
    first = 0 if width == intermediate_size else config.parallel.rank * width
    own = (first, first + width)
    return {
        "gate": LinearShard(f"{prefix}.{names.gate}", intermediate_size, hidden, own, (0, hidden)),
        "up": LinearShard(f"{prefix}.{names.up}", intermediate_size, hidden, own, (0, hidden)),
        "down": LinearShard(f"{prefix}.{names.down}", hidden, intermediate_size, (0, hidden), own),
    }


def _form(config: BuildConfig, shards: list[LinearShard]) -> tuple[str, int | None]:
    """Return the form in which all of these are kept."""
    method: PackedExperts | None = getattr(config.quantization, "experts", None)
    form = None
    if method is not None and keeps_packed(config):
        form = _common([method.form(shard) for shard in shards])
    elif hasattr(method, "block") and keeps_blocks(config):
        blocks: ExpertBlocks = config.quantization.experts  # type: ignore[attr-defined]
        kinds = [kind for shard in shards if (kind := blocks.block(shard)) is not None]
        form = (block_format(kinds), None) if len(kinds) == len(shards) else None
    if form is None and config.quantization.name != PlainWeights.name and decoded_weights(config) is not None:
        _report_decoded(config.quantization.name, config.dtype_name)
    return form or ("plain", None)


def _group_rows(config: BuildConfig, shards: list[LinearShard]) -> int:
    """Return how many rows of each of these have the same scales, from its first one on."""
    rows_of = getattr(getattr(config.quantization, "experts", None), "group_rows", None)
    return 1 if rows_of is None else math.gcd(*map(rows_of, shards))


def _inputs(config: BuildConfig, shards: list[LinearShard]) -> InputRounding | None:
    """Return how inputs of all of these may be rounded."""
    inputs_of = getattr(getattr(config.quantization, "experts", None), "inputs", None)
    found = {None if inputs_of is None else inputs_of(shard) for shard in shards}
    return found.pop() if len(found) == 1 else None


def _common(forms: list[tuple[str, int | None] | None]) -> tuple[str, int | None] | None:
    """Return the form that can hold all of these: codes of 4 bits are codes of 8 too."""
    found = {None if form is None else (form[0].replace("int4", "int8"), form[1]) for form in forms}
    if len(found) > 1 or None in found:
        return None
    return forms[0] if len(set(forms)) == 1 else found.pop()


@cache
def _report_decoded(method: str, dtype: str) -> None:
    logger.info(
        "quantization is %r: experts are kept in %s, decoded while they load where they are quantized.", method, dtype
    )


def _stored_experts(
    config: BuildConfig, prefix: str, spec: ExpertsSpec, intermediate_size: int, num_experts: int, names: ExpertNames
) -> dict[str, nn.Parameter]:
    """Experts of which a checkpoint has a tensor for each matrix, in the spec's form: of each this rank's rows of gate and up, columns of
    down; or all of those that it holds whole."""
    hidden, width, group = spec.hidden_size, spec.intermediate_size, spec.group_size
    held = experts_here(spec, num_experts)
    packing, kinds = PACKED.get(spec.weight_format), kinds_of(spec.weight_format)
    if kinds is not None:
        made = _expert_panels(config, prefix, spec, intermediate_size, held, names, kinds)
        _leave_others(config, prefix, held, num_experts)
        return made
    dtype, scale_dtype, per_number = (None, None, 1) if packing is None else packing
    made = {}
    for name, num_rows, num_columns in (("gate_up", 2 * width, hidden), ("down", hidden, width)):
        made[name] = _parameter(config, len(held), num_rows, num_columns // per_number, dtype=dtype)
        if packing is not None:
            groups = 1 if group is None else -(-num_columns // group)
            made[f"{name}_scale"] = _parameter(config, len(held), num_rows, groups, dtype=scale_dtype)
    places = {
        "gate": ("gate_up", slice(0, width)),
        "up": ("gate_up", slice(width, None)),
        "down": ("down", slice(None)),
    }
    for place, index in enumerate(held):
        for matrix, shard in _shards(config, f"{prefix}.{index}", hidden, intermediate_size, width, names).items():
            name, rows = places[matrix]
            if packing is not None:
                packed: PackedExperts = config.quantization.experts  # type: ignore[attr-defined]
                packed.expect(config, shard, made[name].data[place, rows], made[f"{name}_scale"].data[place, rows])
            else:
                method = decoded_weights(config)
                assert method is not None, "see `_check_method`"
                method.expect(config, shard, made[name][place, rows])
    _leave_others(config, prefix, held, num_experts)
    return made


def _expert_panels(
    config: BuildConfig, prefix: str, spec: ExpertsSpec, intermediate_size: int, held: Sequence[int], names: ExpertNames,
    kinds: list[BlockKind],
) -> dict[str, nn.Parameter]:  # fmt: skip
    """The same in blocks; kinds: of gate, up and down, or of all."""
    blocks: ExpertBlocks = config.quantization.experts  # type: ignore[attr-defined]
    hidden, width = spec.hidden_size, spec.intermediate_size
    shapes = {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
    made = {
        name: _parameter(config, len(held), *panels_shape(kind, *shape), dtype=torch.uint8)
        for (name, shape), kind in zip(shapes.items(), kinds * 3 if len(kinds) == 1 else kinds, strict=True)
    }
    for place, index in enumerate(held):
        for name, shard in _shards(config, f"{prefix}.{index}", hidden, intermediate_size, width, names).items():
            blocks.expect_blocks(config, shard, made[name].data[place])
    return made


def _leave_others(config: BuildConfig, prefix: str, held: Sequence[int], num_experts: int) -> None:
    elsewhere = [str(index) for index in range(num_experts) if index not in held]
    if elsewhere:
        config.weights.ignore(rf"{re.escape(prefix)}\.({'|'.join(elsewhere)})\..*")


def experts_here(spec: ExpertsSpec, num_experts: int) -> Sequence[int]:
    """Return those of which this rank has anything, in the order of their places, as they are loaded."""
    count = num_experts if spec.num_held is None else spec.num_held
    return [place % num_experts for place in range(spec.first_expert, spec.first_expert + count)]


def places_of_ranks(parallel: ParallelContext, num_experts: int) -> list[range]:
    """Return the places that each rank has whole experts at; those of all engines that share them count. Ranks differ by one at most."""
    size = parallel.size * (1 if parallel.experts is None else parallel.experts.size)
    return [range(num_experts * rank // size, num_experts * (rank + 1) // size) for rank in range(size)]


def _held(parallel: ParallelContext, num_experts: int, prefix: str) -> tuple[int, int]:
    """The first expert that this rank holds and how many."""
    places, rank = places_of_ranks(parallel, num_experts), parallel.rank
    if num_experts < len(places):
        raise ConfigError(
            f"tensor_parallel_size x data_parallel_size is {len(places)}, and {prefix} has {num_experts} experts, of which each rank holds "
            f"some (enable_expert_parallel). Use at most {num_experts} ranks."
        )
    if parallel.experts is not None:
        rank += parallel.experts.rank * parallel.size
    return places[rank].start, len(places[rank])


def _parameter(config: BuildConfig, *shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
    return nn.Parameter(config.empty(*shape, dtype=dtype), requires_grad=False)


def _activation(name: str) -> str:
    if name in ("swiglu_oai", "silu_clamped"):
        return name
    if name not in ACTIVATION_NAMES:
        raise ConfigError(f"hidden_act is {name!r}; gated layers have {', '.join(ACTIVATION_NAMES)}.")
    return ACTIVATION_NAMES[name]
