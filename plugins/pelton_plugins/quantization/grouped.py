"""Integer weights of checkpoints, 4 or 8 bits with a scale (and a zero point) for each group of columns: what AWQ, GPTQ and
compressed-tensors share.

A method says which tensors of the checkpoint make a matrix and what numbers they hold; here these are put into the form that the
device's kernels read: on GPUs the groups of `groups.py`, on CPUs the blocks of 32 of `pelton.ops.packed_blocks`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from pelton.errors import ConfigError
from pelton.ops.interface import Linear, LinearNeeds, LinearSpec, LinearTensors, LinearWeights
from pelton.ops.packed_blocks import BLOCK, KINDS, PANEL_ROWS, BlockKind, panels_shape
from pelton.quantization.plain import PlainWeights, make_bias
from pelton_plugins.quantization.cache_scales import take_cache_scales
from pelton_plugins.quantization.merged import create_mixed
from pelton_plugins.weight_forms.block_writing import pack
from pelton_plugins.weight_forms.blocks import is_for_cpu
from pelton_plugins.weight_forms.dummy import DummyTensor, DummyWeight
from pelton_plugins.weight_forms.expert_codes import BLOCK as CODES_BLOCK
from pelton_plugins.weight_forms.expert_codes import put_codes
from pelton_plugins.weight_forms.groups import (
    FORMATS,
    LARGEST_ZERO,
    SMALLEST_GROUP,
    codes_shape,
    pack_codes,
    pack_scales,
)

if TYPE_CHECKING:
    from torch import Tensor

    from pelton.model.build import BuildConfig
    from pelton.model.loading import LazyWeight
    from pelton.quantization.interface import LinearShard

NUMBERS_AT_ONCE = 2**22
"""Of a matrix, unpacked at once."""
WHOLE = -1
"""As a group's size: all columns."""


@dataclass(frozen=True, slots=True)
class GroupForm:
    """How a matrix is quantized."""

    bits: int
    group_size: int  # columns; WHOLE for all
    is_symmetric: bool = False  # every zero point is half of the range
    is_ordered: bool = False  # columns were quantized out of order


@dataclass(frozen=True, slots=True)
class Numbers:
    """A matrix as its checkpoint has it."""

    codes: Callable[[slice], Tensor]  # of these rows [n, in], unsigned
    scales: Tensor  # [out, groups]
    zeros: Tensor  # [out, groups]
    group_of: Tensor | None = None  # [in], the group of each column; None: they are in order


class GroupedWeights(ABC):
    """A `QuantizationMethod` for integer weights in groups."""

    name: ClassVar[str]

    @abstractmethod
    def form(self, shard: LinearShard) -> GroupForm | None:
        """How the matrix is quantized; None: it is kept in the model's dtype."""

    @abstractmethod
    def tensors(self, shard: LinearShard, form: GroupForm) -> Mapping[str, tuple[int, ...] | None]:
        """The names of the checkpoint's tensors that make the matrix, behind its own, and their shapes (None: any)."""

    @abstractmethod
    def numbers(self, shard: LinearShard, form: GroupForm, found: Mapping[str, Tensor]) -> Numbers:
        """Read the whole matrix from those tensors."""

    def dummy(self, shard: LinearShard, form: GroupForm) -> Mapping[str, DummyTensor | Tensor]:
        """Return what those tensors are without a checkpoint (`--load-format dummy`). Optional: the loader goes by their names."""
        return {}

    @property
    def experts(self) -> GroupedExperts:
        return GroupedExperts(self)

    @property
    def decoded(self) -> DecodedGroups:
        return DecodedGroups(self)

    def is_quantized_head(self, shard: LinearShard) -> bool:
        """Return whether the matrix of the vocabulary is quantized: embeddings never are."""
        return False

    def create(
        self, config: BuildConfig, shards: Sequence[LinearShard], *, bias: bool, is_vocabulary: bool = False
    ) -> LinearWeights:
        take_cache_scales(config)
        if is_vocabulary and not self.is_quantized_head(shards[0]):
            return PlainWeights().create(config, shards, bias=bias, is_vocabulary=is_vocabulary)
        forms = [self.form(shard) for shard in shards]
        form = forms[0]
        if forms.count(form) < len(forms):
            return create_mixed(config, shards, bias=bias)
        if form is None:
            return PlainWeights().create(config, shards, bias=bias, is_vocabulary=is_vocabulary)
        group = _checked_group(self.name, shards[0], form)
        if not is_for_cpu(config):
            kept: _Kept = _Groups(config, shards, form, group)
        elif block_kind(form) is None:
            kept = _Dequantized(config, shards, form, group)
        else:
            kept = _Blocks(config, shards, form, group)
        by_name: dict[str, list[int]] = {}
        for index, shard in enumerate(shards):
            by_name.setdefault(shard.name, []).append(index)
        for indices in by_name.values():
            shard = shards[indices[0]]
            done = partial(self._take, kept, form, [(i, shards[i]) for i in indices])
            Collector(config, shard.name, self.tensors(shard, form), done, partial(self.dummy, shard, form))
        vector = make_bias(config, shards) if bias else None
        spec = replace(kept.spec, has_bias=vector is not None, is_ordered=form.is_ordered)
        return LinearWeights(spec, kept.tensors, vector)

    def _take(
        self, kept: _Kept, form: GroupForm, parts: Sequence[tuple[int, LinearShard]], found: Mapping[str, Tensor]
    ) -> None:
        shard = parts[0][1]
        numbers = _finite(shard, self.numbers(shard, form, found))
        order = None
        if form.is_ordered:
            order = _order(shard, numbers, kept.group)
            kept.take_order(shard, order)
        for index, part in parts:
            kept.take(index, part, numbers, order)


class GroupedExperts:
    """Matrices of experts as codes and words, or in panels (`PackedExperts` and `ExpertBlocks` of `pelton_plugins.models.experts`). Where
    columns are out of order, or a rank's part cuts a group, they are decoded."""

    def __init__(self, method: GroupedWeights) -> None:
        self._method = method

    def form(self, shard: LinearShard) -> tuple[str, int | None] | None:
        form, num_cols = self._method.form(shard), shard.cols[1] - shard.cols[0]
        if form is None or form.is_ordered:
            return None
        group = None if form.group_size == WHOLE else form.group_size
        block = CODES_BLOCK if group is None else group
        is_whole = (form.bits == 8 and group is None) or not any(edge % block for edge in (*shard.cols, num_cols))
        is_power = group is None or (group >= SMALLEST_GROUP and group & (group - 1) == 0)
        return (FORMATS[form.bits], group) if is_whole and is_power else None

    def block(self, shard: LinearShard) -> BlockKind | None:
        form = self._method.form(shard)
        if form is None or form.is_ordered:
            return None
        size = BLOCK if form.group_size == WHOLE else form.group_size
        is_whole = size % BLOCK == 0 and not any(edge % size for edge in (*shard.cols, shard.num_cols))
        return block_kind(form) if is_whole else None

    def expect(self, config: BuildConfig, shard: LinearShard, weight: Tensor, scale: Tensor) -> None:
        self._expect(config, shard, partial(self._take, weight, scale))

    def expect_blocks(self, config: BuildConfig, shard: LinearShard, panels: Tensor) -> None:
        self._expect(config, shard, partial(self._take_blocks, shard, panels))

    def _expect(self, config: BuildConfig, shard: LinearShard, put: Callable[[Tensor, Tensor, Tensor], None]) -> None:
        """put: takes codes, scales and zero points of this rank's part."""
        form = self._method.form(shard)
        if form is None:
            raise ConfigError(
                f"quantization is {self._method.name!r}, and {shard.name} is not quantized, though other experts of its layer are. "
                "Take a checkpoint that treats them alike."
            )
        groups = slice(None)
        if form.group_size != WHOLE:
            groups = slice(shard.cols[0] // form.group_size, -(-shard.cols[1] // form.group_size))

        def done(found: Mapping[str, Tensor]) -> None:
            numbers, rows = _finite(shard, self._method.numbers(shard, form, found)), slice(*shard.rows)
            put(numbers.codes(rows)[:, slice(*shard.cols)], numbers.scales[rows, groups], numbers.zeros[rows, groups])

        dummy = partial(self._method.dummy, shard, form)
        Collector(config, shard.name, self._method.tensors(shard, form), done, dummy)

    @staticmethod
    def _take(weight: Tensor, scale: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor) -> None:
        put_codes(codes, weight)
        scale.copy_(pack_scales(scales, zeros))

    def _take_blocks(self, shard: LinearShard, panels: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor) -> None:
        kind = self.block(shard)
        if kind is None:
            raise ConfigError(
                f"quantization is {self._method.name!r}, and {shard.name} is not quantized as other experts of its layer are. "
                "Take a checkpoint that treats them alike."
            )
        pack(_blocks(codes, scales, zeros, kind, shard.name), kind, panels)


class DecodedGroups(PlainWeights):
    """Plain weights from codes, scales and zero points: of matrices that an op reads in the model's dtype."""

    def __init__(self, method: GroupedWeights) -> None:
        self.name, self._method = method.name, method

    def expect(self, config: BuildConfig, shard: LinearShard, target: Tensor) -> None:
        form = self._method.form(shard)
        if form is None:
            super().expect(config, shard, target)
            return
        done, dummy = partial(self._take, shard, form, target), partial(self._method.dummy, shard, form)
        Collector(config, shard.name, self._method.tensors(shard, form), done, dummy)

    def _take(self, shard: LinearShard, form: GroupForm, target: Tensor, found: Mapping[str, Tensor]) -> None:
        numbers = _finite(shard, self._method.numbers(shard, form, found))
        rows, cols = slice(*shard.rows), torch.arange(*shard.cols, device=numbers.scales.device)
        size = shard.num_cols if form.group_size == WHOLE else form.group_size
        group_of = cols // size if numbers.group_of is None else numbers.group_of.to(torch.int64)[cols]
        scales, zeros = (part[rows].float()[:, group_of] for part in (numbers.scales, numbers.zeros))
        target.copy_((numbers.codes(rows)[:, slice(*shard.cols)].float() - zeros) * scales)


def _finite(shard: LinearShard, numbers: Numbers) -> Numbers:
    if not torch.isfinite(numbers.scales).all():
        raise ConfigError(f"{shard.name} has a scale that is not finite. Download the checkpoint again.")
    if numbers.zeros.amax() > LARGEST_ZERO:
        raise ConfigError(f"{shard.name} has a zero point above {LARGEST_ZERO}. Download the checkpoint again.")
    return numbers


def _checked_group(method: str, shard: LinearShard, form: GroupForm) -> int:
    """The size of a group within this rank's columns."""
    num_cols = shard.cols[1] - shard.cols[0]
    group = shard.num_cols if form.group_size == WHOLE else form.group_size
    if form.group_size == WHOLE:
        return num_cols
    if (
        group % SMALLEST_GROUP
        or (group > 128 and group % 128)
        or (group < 128 and 128 % group)
        or shard.num_cols % group
    ):
        raise ConfigError(
            f"quantization is {method!r} with groups of {group} columns, and {shard.name} has {shard.num_cols} columns; served are "
            "groups of 32, 64 or a multiple of 128 that divides the columns, or -1 for all. Take a checkpoint of that kind."
        )
    if any(edge % group for edge in shard.cols):
        raise ConfigError(
            f"This rank's columns {shard.cols} of {shard.name} cut a group of {group}. Lower tensor_parallel_size."
        )
    if form.is_ordered and num_cols < shard.num_cols:
        raise ConfigError(
            f"{shard.name} was quantized out of order (desc_act), and its columns are shared out over ranks. "
            "Set tensor_parallel_size to 1, or take a checkpoint with desc_act false."
        )
    return group


def _order(shard: LinearShard, numbers: Numbers, group: int) -> Tensor:
    """Columns by their group [in]."""
    assert numbers.group_of is not None
    group_of = numbers.group_of.to(torch.int64)
    order = torch.argsort(group_of, stable=True)
    wanted = torch.arange(len(order), device=order.device) // group
    if not torch.equal(group_of[order], wanted):
        raise ConfigError(
            f"{shard.name}.g_idx does not give each group {group} columns. Check that config.json belongs to these weights."
        )
    return order


class Collector:
    """The tensors of one matrix, which come in any order; `done` is called with all of them."""

    def __init__(
        self, config: BuildConfig, name: str, wanted: Mapping[str, tuple[int, ...] | None],
        done: Callable[[Mapping[str, Tensor]], None],
        dummy: Callable[[], Mapping[str, DummyTensor | Tensor]] = dict,
    ) -> None:  # fmt: skip
        """dummy: see `GroupedWeights.dummy`."""
        self._done, self._dummy, self._device = done, dummy, config.device
        self._missing = set(wanted)
        self._found: dict[str, Tensor] = {}
        place = torch.empty(0)
        for suffix, shape in wanted.items():
            config.weights.expect(f"{name}.{suffix}", shape, place, fill=partial(self._take, suffix))

    def _take(self, suffix: str, weight: LazyWeight, place: Tensor) -> None:
        self._found[suffix] = self._read(suffix, weight)
        self._missing.discard(suffix)
        if not self._missing:
            found, self._found = self._found, {}
            self._done(found)

    def _read(self, suffix: str, weight: LazyWeight) -> Tensor:
        if isinstance(weight, DummyWeight) and (what := self._dummy().get(suffix)) is not None:
            return weight.draw(what, self._device) if isinstance(what, DummyTensor) else what.to(self._device)
        return weight.read().to(self._device, copy=True)


class _Kept(ABC):
    """The memory of a matrix."""

    spec: LinearSpec
    tensors: dict[str, Tensor]
    group: int

    def __init__(self, config: BuildConfig, shards: Sequence[LinearShard], form: GroupForm, group: int) -> None:
        self.form, self.group = form, group
        self.num_cols = shards[0].cols[1] - shards[0].cols[0]
        self.counts = [shard.rows[1] - shard.rows[0] + shard.padding for shard in shards]
        self.starts = [sum(self.counts[:index]) for index in range(len(shards))]
        self.tensors = {}
        self.has_order = False
        if form.is_ordered:
            self.order = torch.zeros(self.num_cols, dtype=torch.int32, device=config.device)

    def take_order(self, shard: LinearShard, order: Tensor) -> None:
        if self.has_order and not torch.equal(self.order, order.to(torch.int32)):
            raise ConfigError(
                f"{shard.name} has its columns in another order than the matrices that it is merged with. Take a checkpoint with "
                "desc_act false."
            )
        self.order.copy_(order)
        self.has_order = True

    @abstractmethod
    def take(self, index: int, shard: LinearShard, numbers: Numbers, order: Tensor | None) -> None:
        """Put this rank's rows and columns of one part into place, its columns in `order`."""

    def pieces(self, shard: LinearShard, numbers: Numbers, order: Tensor | None) -> Any:
        """(first row of the rank's, codes [n, columns], scales, zeros [n, groups]) of some rows after others."""
        (first, last), columns = shard.rows, slice(*shard.cols)
        groups = slice(None)
        if self.num_cols < shard.num_cols and self.form.group_size != WHOLE:
            groups = slice(shard.cols[0] // self.group, shard.cols[1] // self.group)
        step = max(NUMBERS_AT_ONCE // shard.num_cols // PANEL_ROWS, 1) * PANEL_ROWS
        for start in range(first, last, step):
            rows = slice(start, min(start + step, last))
            codes = numbers.codes(rows)
            codes = codes[:, columns] if order is None else codes[:, order]
            yield start - first, codes, numbers.scales[rows, groups], numbers.zeros[rows, groups]


class _Groups(_Kept):
    """As `groups.py` has them."""

    def __init__(self, config: BuildConfig, shards: Sequence[LinearShard], form: GroupForm, group: int) -> None:
        super().__init__(config, shards, form, group)
        num_rows = sum(self.counts)
        self.codes = torch.zeros(
            codes_shape(num_rows, self.num_cols, form.bits), dtype=torch.int32, device=config.device
        )
        self.scales = torch.zeros(num_rows, self.num_cols // group, dtype=torch.int32, device=config.device)
        self.tensors = {"codes": self.codes, "scales": self.scales}
        if form.is_ordered:
            self.tensors["order"] = self.order
        self.spec = LinearSpec(in_features=self.num_cols, out_features=num_rows, weight_format=FORMATS[form.bits])

    def take(self, index: int, shard: LinearShard, numbers: Numbers, order: Tensor | None) -> None:
        for start, codes, scales, zeros in self.pieces(shard, numbers, order):
            rows = slice(self.starts[index] + start, self.starts[index] + start + len(codes))
            self.codes[rows] = pack_codes(codes, self.form.bits)
            self.scales[rows] = pack_scales(scales, zeros)


class _Blocks(_Kept):
    """As `pelton.ops.packed_blocks` has them: q4_0 and q8_0 without zero points, q4_1 with a minimum in place of one."""

    def __init__(self, config: BuildConfig, shards: Sequence[LinearShard], form: GroupForm, group: int) -> None:
        super().__init__(config, shards, form, group)
        if config.parallel.size > 1:
            raise ConfigError(
                f"tensor_parallel_size is {config.parallel.size}, and integer weights on a CPU are of one rank. Set it to 1."
            )
        if self.num_cols % BLOCK:
            raise ConfigError(f"{shards[0].name} has {self.num_cols} columns; blocks take a multiple of {BLOCK}.")
        kind = block_kind(form)
        assert kind is not None, "see `GroupedWeights.create`"
        self.kind = kind
        for index, count in enumerate(self.counts):
            self.tensors[f"part{index}"] = config.empty(
                *panels_shape(self.kind, count, self.num_cols), dtype=torch.uint8
            )
        if form.is_ordered:
            self.tensors["order"] = self.order
        self.spec = LinearSpec(
            in_features=self.num_cols, out_features=sum(self.counts), weight_format=kind.name, parts=tuple(self.counts)
        )

    def take(self, index: int, shard: LinearShard, numbers: Numbers, order: Tensor | None) -> None:
        panels = self.tensors[f"part{index}"]
        for start, codes, scales, zeros in self.pieces(shard, numbers, order):
            target = panels[start // PANEL_ROWS : -(-(start + len(codes)) // PANEL_ROWS)]
            packed = torch.empty(target.shape, dtype=torch.uint8)
            pack(_blocks(codes, scales, zeros, self.kind, shard.name), self.kind, packed)
            target.copy_(packed)


def block_kind(form: GroupForm) -> BlockKind | None:
    """The kind of blocks that hold such numbers; None: there is none with 8 bits and a minimum."""
    if form.bits == 8:
        return KINDS["q8_0"] if form.is_symmetric else None
    return KINDS["q4_0" if form.is_symmetric else "q4_1"]


def _blocks(codes: Tensor, scales: Tensor, zeros: Tensor, kind: BlockKind, name: str) -> Tensor:
    """[n, in] -> rows of blocks [n, bytes] uint8"""
    num_rows, num_blocks = codes.shape[0], codes.shape[1] // BLOCK
    numbers = codes.reshape(num_rows, num_blocks, BLOCK)
    per_group = num_blocks // scales.shape[1]
    scale = scales.float().repeat_interleave(per_group, 1)[..., None]
    heads = [scale]
    if kind.has_minimum:
        heads.append(scale * -zeros.float().repeat_interleave(per_group, 1)[..., None])
    head = torch.cat(heads, -1).half()
    if not torch.isfinite(head).all():
        raise ConfigError(
            f"{name} has a scale beyond float16, in which blocks keep it. Serve this checkpoint on a GPU."
        )
    if kind.name == "q8_0":
        quants = (numbers.to(torch.int16) - 128).to(torch.int8).view(torch.uint8)
    else:
        halves = numbers.to(torch.uint8)
        quants = halves[..., : BLOCK // 2] | halves[..., BLOCK // 2 :] << 4
    return torch.cat([head.view(torch.uint8), quants], dim=-1).reshape(num_rows, num_blocks * kind.block_bytes)


class _Dequantized(_Kept):
    """In the model's dtype, where no kernel of the device reads the form."""

    def __init__(self, config: BuildConfig, shards: Sequence[LinearShard], form: GroupForm, group: int) -> None:
        super().__init__(config, shards, form, group)
        self.weight = config.empty(sum(self.counts), self.num_cols)
        self.tensors = {"weight": self.weight}
        if form.is_ordered:
            self.tensors["order"] = self.order
        self.spec = LinearSpec(in_features=self.num_cols, out_features=sum(self.counts))

    def take(self, index: int, shard: LinearShard, numbers: Numbers, order: Tensor | None) -> None:
        for start, codes, scales, zeros in self.pieces(shard, numbers, order):
            rows = slice(self.starts[index] + start, self.starts[index] + start + len(codes))
            groups = codes.float().view(*scales.shape, -1)
            weight = (groups - zeros.float()[..., None]) * scales.float()[..., None]
            self.weight[rows] = weight.flatten(1).to(self.weight.dtype)


class OrderedLinear:
    """The product with a weight whose columns are in another order: the inputs are brought into it, then another op multiplies."""

    handles = frozenset(["is_ordered", "weight_format", "has_bias", "inputs"])
    is_recordable = True

    @staticmethod
    def unsupported(needs: LinearNeeds) -> list[str]:
        return [] if needs.linear.is_ordered else ["columns in order"]

    @staticmethod
    def compose(needs: LinearNeeds, tensors: LinearTensors, bind: Callable[..., Any]) -> Linear:
        weights = tensors.linear
        spec = replace(needs.linear, is_ordered=False)
        order = weights.tensors["order"]
        others = {name: tensor for name, tensor in weights.tensors.items() if name != "order"}
        inner = LinearWeights(spec, others, weights.bias, weights.finish)
        product: Linear = bind("linear", replace(needs, linear=spec), LinearTensors(inner))

        def call(x: Tensor) -> Tensor:
            return product(x.index_select(1, order))

        return call


def unpack_words(words: Tensor, bits: int, dim: int) -> Tensor:
    """int32 words, the first number in the lowest bits -> the numbers [..., 32 / bits times as many, ...] int32 along `dim`."""
    shifts = torch.arange(32 // bits, device=words.device, dtype=torch.int32) * bits
    wide = words.unsqueeze(dim + 1)
    shape = [1] * wide.dim()
    shape[dim + 1] = -1
    return ((wide >> shifts.view(shape)) & (2**bits - 1)).flatten(dim, dim + 1)


def read_bits(settings: Mapping[str, Any], key: str, method: str) -> int:
    bits = settings.get(key)
    if bits not in FORMATS:
        raise ConfigError(
            f"config.json's quantization_config ({method}) has {key} {bits!r}; served are {', '.join(map(str, FORMATS))}. "
            "Take a checkpoint of that kind."
        )
    return int(bits)
