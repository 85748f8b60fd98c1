"""compressed-tensors checkpoints: each group of the configuration says which matrices it is of and how they are quantized; what it
ignores stays in the model's dtype.

Served: 8-bit floating point ("float-quantized"), integers of 4 or 8 bits with inputs as they are ("pack-quantized"), and int8
("int-quantized"), whose inputs are not rounded here, which is nearer to the model that was quantized. Four-bit floating point
("nvfp4-pack-quantized", "mxfp4-pack-quantized") is decoded while it loads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import torch

from pelton.errors import ConfigError
from pelton.ops.interface import InputRounding, LinearWeights
from pelton.quantization.plain import PlainWeights
from pelton_plugins.quantization.cache_scales import check_scheme, take_cache_scales
from pelton_plugins.quantization.fp4 import MXFP4_PACKED, NVFP4_PACKED, Fp4Weights
from pelton_plugins.quantization.fp8 import DYNAMIC, STATIC, BlockFp8, RowExperts, StoredFp8
from pelton_plugins.quantization.fp8_decoded import BlockExperts, DecodedFp8
from pelton_plugins.quantization.grouped import WHOLE, GroupedWeights, GroupForm, Numbers, read_bits, unpack_words
from pelton_plugins.quantization.merged import create_mixed
from pelton_plugins.quantization.module_names import matches, spellings
from pelton_plugins.weight_forms.dummy import DummyTensor, group_scales

if TYPE_CHECKING:
    from torch import Tensor

    from pelton.config import EngineConfig
    from pelton.model.build import BuildConfig
    from pelton.model.resolved import ResolvedModel
    from pelton.ops.packed_blocks import BlockKind
    from pelton.quantization.interface import LinearShard, QuantizationMethod

NAME = "compressed-tensors"
FLOAT_FORMATS = ("float-quantized", "naive-quantized")
FLOAT_STRATEGIES = ("tensor", "channel", "block")
PACKED_FORMATS = ("pack-quantized",)
INTEGER_FORMATS = ("int-quantized",)
FP4_FORMATS = {"nvfp4-pack-quantized": NVFP4_PACKED, "mxfp4-pack-quantized": MXFP4_PACKED}
ADVICE = "Take a checkpoint of that form, or one that is not quantized."
_Method: TypeAlias = "_Fp8 | _Fp8Blocks | _Packed | Fp4Weights"


class CompressedTensors:
    """A `QuantizationMethod` that hands each matrix to the method of its group."""

    name: ClassVar[str] = NAME

    def __init__(self, config: EngineConfig, model: ResolvedModel) -> None:
        settings = model.hf_config.get("quantization_config") or {}
        if (settings.get("sparsity_config") or {}).get("format", "dense") != "dense":
            raise ConfigError(
                f"config.json's quantization_config has the sparsity format {settings['sparsity_config']['format']!r}; served is 'dense'. "
                + ADVICE
            )
        if settings.get("transform_config"):
            raise ConfigError(
                "config.json's quantization_config has a transform_config, by which inputs are turned before a product; served are "
                f"checkpoints without it. {ADVICE}"
            )
        check_scheme(config.kv_cache.kv_cache_dtype, settings.get("kv_cache_scheme") or {})
        self._ignored = settings.get("ignore") or []
        self._groups: list[tuple[Sequence[str], _Method]] = [
            (group.get("targets") or ["Linear"], _method(name, group, group.get("format") or settings.get("format")))
            for name, group in (settings.get("config_groups") or {}).items()
        ]

        self.experts, self.decoded = _Experts(self), _Decoded(self)

    def method_of(self, shard: LinearShard) -> _Method | None:
        """Return that of the group which names the matrix, else of the one for all linear layers; None: it is not quantized."""
        if any(_names(pattern, shard.name) for pattern in self._ignored):
            return None
        named = [method for targets, method in self._groups if any(_names(target, shard.name) for target in targets)]
        return (named + [method for targets, method in self._groups if "Linear" in targets] + [None])[0]

    def create(
        self, config: BuildConfig, shards: Sequence[LinearShard], *, bias: bool, is_vocabulary: bool = False
    ) -> LinearWeights:
        take_cache_scales(config)
        is_embedding = is_vocabulary and not shards[0].name.endswith("lm_head")
        methods = [None if is_embedding else self.method_of(shard) for shard in shards]
        if methods.count(methods[0]) < len(methods):
            return create_mixed(config, shards, bias=bias)
        if is_vocabulary and isinstance(methods[0], (_Fp8, _Fp8Blocks)):  # a head is not kept in e4m3
            return methods[0].decoded.create(config, shards, bias=bias)
        method: QuantizationMethod = methods[0] or PlainWeights()
        return method.create(config, shards, bias=bias, is_vocabulary=is_vocabulary)


class _Experts:
    """Matrices of experts, each as the method of its group keeps them."""

    def __init__(self, method: CompressedTensors) -> None:
        self._method = method

    def form(self, shard: LinearShard) -> tuple[str, int | None] | None:
        method = self._method.method_of(shard)
        return None if method is None else method.experts.form(shard)

    def group_rows(self, shard: LinearShard) -> int:
        """See `BlockExperts`."""
        method = self._method.method_of(shard)
        return method.experts.group_rows(shard) if isinstance(method, _Fp8Blocks) and method.experts is not None else 1

    def inputs(self, shard: LinearShard) -> InputRounding | None:
        method = self._method.method_of(shard)
        experts = None if method is None else method.experts
        return experts.inputs(shard) if isinstance(experts, (RowExperts, BlockExperts)) else None

    def block(self, shard: LinearShard) -> BlockKind | None:
        method = self._method.method_of(shard)
        return method.experts.block(shard) if isinstance(method, GroupedWeights) else None

    def expect(self, config: BuildConfig, shard: LinearShard, weight: Tensor, scale: Tensor) -> None:
        method = self._method.method_of(shard)
        if method is None:
            raise self._differs(shard)
        method.experts.expect(config, shard, weight, scale)

    def expect_blocks(self, config: BuildConfig, shard: LinearShard, panels: Tensor) -> None:
        method = self._method.method_of(shard)
        if not isinstance(method, GroupedWeights):
            raise self._differs(shard)
        method.experts.expect_blocks(config, shard, panels)

    def _differs(self, shard: LinearShard) -> ConfigError:
        return ConfigError(
            f"quantization is {NAME!r}, and {shard.name} is not quantized, though other experts of its layer are. {ADVICE}"
        )


class _Decoded(PlainWeights):
    """Matrices in the model's dtype, each decoded by the method of its group."""

    name = NAME

    def __init__(self, method: CompressedTensors) -> None:
        self._method = method

    def expect(self, config: BuildConfig, shard: LinearShard, target: Tensor) -> None:
        method = self._method.method_of(shard)
        (PlainWeights() if method is None else method.decoded).expect(config, shard, target)


class _Fp8(StoredFp8):
    name: ClassVar[str] = NAME

    def __init__(self, inputs: InputRounding | None) -> None:
        self._inputs = inputs

    def inputs_of(self, shard: LinearShard) -> tuple[bool, InputRounding | None]:
        return True, self._inputs


class _Fp8Blocks(BlockFp8):
    """`weight` e4m3, `weight_scale` for each block; inputs may be rounded where the group has them rounded."""

    name = NAME

    def __init__(self, block: Sequence[int], inputs: InputRounding | None) -> None:
        self.inputs = inputs
        self.decoded = _DecodedBlocks(block, inputs)


class _DecodedBlocks(DecodedFp8):
    name = NAME

    def __init__(self, block: Sequence[int], inputs: InputRounding | None) -> None:
        super().__init__({"weight_block_size": block}, (), inputs)
        self._scale = "weight_scale"


class _Packed(GroupedWeights):
    """`weight_packed` [out, in bits / 32] int32, `weight_scale` [out, groups], `weight_shape`; with zero points `weight_zero_point`
    [out bits / 32, groups], with columns out of order `weight_g_idx` [in]."""

    name: ClassVar[str] = NAME

    def __init__(self, form: GroupForm) -> None:
        self._form = form

    def is_quantized_head(self, shard: LinearShard) -> bool:
        return True  # else it is ignored

    def form(self, shard: LinearShard) -> GroupForm | None:
        return self._form

    def tensors(self, shard: LinearShard, form: GroupForm) -> Mapping[str, tuple[int, ...] | None]:
        groups = 1 if form.group_size == WHOLE else shard.num_cols // form.group_size
        per_word = 32 // form.bits
        wanted: dict[str, tuple[int, ...] | None] = {
            "weight_packed": (shard.num_rows, -(-shard.num_cols // per_word)), "weight_scale": (shard.num_rows, groups),
            "weight_shape": (2,),
        }  # fmt: skip
        if not form.is_symmetric:
            wanted["weight_zero_point"] = (-(-shard.num_rows // per_word), groups)
        if form.is_ordered:
            wanted["weight_g_idx"] = (shard.num_cols,)
        return wanted

    def dummy(self, shard: LinearShard, form: GroupForm) -> Mapping[str, DummyTensor | Tensor]:
        wanted = self.tensors(shard, form)
        found: dict[str, DummyTensor | Tensor] = {
            name: DummyTensor(wanted[name] or (), torch.int32)
            for name in ("weight_packed", "weight_zero_point") if name in wanted
        }  # fmt: skip
        return found | {
            "weight_scale": group_scales(wanted["weight_scale"] or (), form.bits, torch.bfloat16),
            "weight_shape": torch.tensor([shard.num_rows, shard.num_cols]),
            "weight_g_idx": torch.arange(shard.num_cols, dtype=torch.int32) // max(form.group_size, 1),
        }

    def numbers(self, shard: LinearShard, form: GroupForm, found: Mapping[str, Tensor]) -> Numbers:
        shape = found["weight_shape"].tolist()
        if shape != [shard.num_rows, shard.num_cols]:
            raise ConfigError(
                f"{shard.name}.weight_shape is {shape}; config.json makes it {[shard.num_rows, shard.num_cols]}. "
                "Check that config.json belongs to these weights."
            )
        words = found["weight_packed"]

        def codes(rows: slice) -> Tensor:
            return unpack_words(words[rows], form.bits, 1)[:, : shard.num_cols]

        scales = found["weight_scale"]
        if form.is_symmetric:
            zeros = torch.full(scales.shape, 2 ** (form.bits - 1), dtype=torch.int32, device=scales.device)
        else:
            zeros = unpack_words(found["weight_zero_point"], form.bits, 0)[: shard.num_rows]
        return Numbers(codes, scales, zeros, found.get("weight_g_idx"))


class _Int8(_Packed):
    """`weight` [out, in] int8, `weight_scale` [out, groups], or one number; with zero points `weight_zero_point` int8, alike. Scales
    and zero points of inputs are not used."""

    def tensors(self, shard: LinearShard, form: GroupForm) -> Mapping[str, tuple[int, ...] | None]:
        wanted: dict[str, tuple[int, ...] | None] = {"weight": (shard.num_rows, shard.num_cols), "weight_scale": None}
        if not form.is_symmetric:
            wanted["weight_zero_point"] = None
        return wanted

    def dummy(self, shard: LinearShard, form: GroupForm) -> Mapping[str, DummyTensor | Tensor]:
        groups = 1 if form.group_size == WHOLE else shard.num_cols // form.group_size
        return {
            "weight": DummyTensor((shard.num_rows, shard.num_cols), torch.int8),
            "weight_scale": group_scales((shard.num_rows, groups), form.bits, torch.bfloat16),
            "weight_zero_point": torch.zeros(shard.num_rows, groups, dtype=torch.int8),
        }

    def create(
        self, config: BuildConfig, shards: Sequence[LinearShard], *, bias: bool, is_vocabulary: bool = False
    ) -> LinearWeights:
        config.weights.ignore(r".*\.input_(scale|zero_point)")
        return super().create(config, shards, bias=bias, is_vocabulary=is_vocabulary)

    def numbers(self, shard: LinearShard, form: GroupForm, found: Mapping[str, Tensor]) -> Numbers:
        weight = found["weight"]
        if weight.dtype != torch.int8:
            raise ConfigError(
                f"{shard.name}.weight is {str(weight.dtype).removeprefix('torch.')}, and config.json's quantization_config says it is "
                "int8. Check that config.json belongs to these weights."
            )
        groups = 1 if form.group_size == WHOLE else shard.num_cols // form.group_size

        def of_groups(name: str) -> Tensor:
            tensor = found[name]
            if tuple(tensor.shape) not in [(shard.num_rows, groups), (shard.num_rows,) * (groups == 1), (1,), ()]:
                raise ConfigError(
                    f"{shard.name}.{name} is {list(tensor.shape)}; expected {[shard.num_rows, groups]}. Check that config.json "
                    "belongs to these weights."
                )
            return tensor.reshape(-1, groups if tensor.dim() == 2 else 1).expand(shard.num_rows, groups)

        def codes(rows: slice) -> Tensor:
            return weight[rows].to(torch.int16) + 128

        scales = of_groups("weight_scale")
        zeros = torch.zeros_like(scales) if form.is_symmetric else of_groups("weight_zero_point")
        return Numbers(codes, scales, zeros.to(torch.int32) + 128)


def _names(pattern: str, name: str) -> bool:
    if pattern.startswith("re:"):
        return matches(pattern.removeprefix("re:"), name)
    return pattern in spellings(name)


def _method(name: str, group: Mapping[str, Any], form: str | None) -> _Method:
    if form in FLOAT_FORMATS:
        weights = group.get("weights") or {}
        _check_float(name, weights)
        if weights.get("strategy") == "block":
            inputs = _block_rounding(name, group.get("input_activations"))
            block = weights.get("block_structure")
            if not (
                isinstance(block, list)
                and len(block) == 2
                and all(isinstance(size, int) and size > 0 for size in block)
            ):
                raise ConfigError(
                    f"config.json's quantization_config has block_structure {block!r} ({name}); expected two sizes, such as [128, 128]."
                )
            return _Fp8Blocks(block, inputs)
        return _Fp8(_rounding(name, group.get("input_activations")))
    if form in PACKED_FORMATS:
        if group.get("input_activations"):
            raise ConfigError(
                f"config.json's quantization_config rounds inputs of packed weights ({name}); served are inputs as they are. {ADVICE}"
            )
        return _Packed(_group_form(name, group.get("weights") or {}))
    if form in INTEGER_FORMATS:
        _check_integer_inputs(name, group.get("input_activations"))
        made = _group_form(name, group.get("weights") or {}, ("group", "channel", "tensor"))
        if made.bits != 8 or made.is_ordered:
            raise ConfigError(
                f"config.json's quantization_config has {made.bits} bits in the format {form!r} ({name}); served are 8, in order. {ADVICE}"
            )
        return _Int8(made)
    if form in FP4_FORMATS:
        return Fp4Weights(NAME, FP4_FORMATS[form])
    raise ConfigError(
        f"config.json's quantization_config has the format {form!r} ({name}); served are {FLOAT_FORMATS[0]!r}, 8-bit floating "
        f"point, {PACKED_FORMATS[0]!r}, integers of 4 or 8 bits, {INTEGER_FORMATS[0]!r}, int8, and, decoded, {' and '.join(FP4_FORMATS)}. "
        + ADVICE
    )


def _check_integer_inputs(group: str, inputs: Mapping[str, Any] | None) -> None:
    if inputs and (inputs.get("type", "int"), inputs.get("num_bits", 8)) != ("int", 8):
        raise ConfigError(
            f"config.json's quantization_config rounds inputs to type {inputs.get('type')!r}, {inputs.get('num_bits')} bits ({group}); "
            f"beside int8 weights served is int, 8. {ADVICE}"
        )


def _group_form(
    name: str, weights: Mapping[str, Any], strategies: Sequence[str] = ("group", "channel")
) -> GroupForm:  # fmt: skip
    strategy = weights.get("strategy") or ("group" if weights.get("group_size") else "channel")
    if weights.get("type", "int") != "int" or strategy not in strategies or weights.get("dynamic"):
        raise ConfigError(
            f"config.json's quantization_config has weights of type {weights.get('type')!r}, strategy {strategy!r} ({name}); served "
            f"is int, {' or '.join(strategies)}, not dynamic. {ADVICE}"
        )
    order = weights.get("actorder") or None
    if order not in (None, True, "group", "weight", "static"):
        raise ConfigError(
            f"config.json's quantization_config has actorder {order!r} ({name}); served are group and weight."
        )
    group_size = weights.get("group_size") or WHOLE
    return GroupForm(
        read_bits(weights, "num_bits", NAME), group_size if strategy == "group" else WHOLE,
        is_symmetric=weights.get("symmetric", True), is_ordered=strategy == "group" and order in (True, "group"),
    )  # fmt: skip


def _check_float(group: str, weights: Mapping[str, Any]) -> None:
    found = (weights.get("type"), weights.get("num_bits"), weights.get("strategy"), weights.get("symmetric", True))
    if found not in [("float", 8, strategy, True) for strategy in FLOAT_STRATEGIES]:
        raise ConfigError(
            f"config.json's quantization_config has weights of type {found[0]!r}, {found[1]} bits, strategy {found[2]!r} ({group}); "
            f"served is float, 8, {' or '.join(FLOAT_STRATEGIES)}, symmetric. {ADVICE}"
        )


def _block_rounding(group: str, inputs: Mapping[str, Any] | None) -> InputRounding | None:
    """Return how inputs may be rounded beside blocks: by scales that are made of them; a checkpoint has none."""
    if inputs and not (inputs.get("type") == "float" and inputs.get("num_bits") == 8 and inputs.get("dynamic")):
        raise ConfigError(
            f"config.json's quantization_config rounds inputs to type {inputs.get('type')!r}, {inputs.get('num_bits')} bits, dynamic "
            f"{bool(inputs.get('dynamic'))} ({group}); beside weights in blocks served is float, 8, dynamic. {ADVICE}"
        )
    return DYNAMIC if inputs else None


def _rounding(group: str, inputs: Mapping[str, Any] | None) -> InputRounding | None:
    if not inputs:
        return None
    found = (inputs.get("type"), inputs.get("num_bits"), inputs.get("strategy"), bool(inputs.get("dynamic")))
    known = {("float", 8, "token", True): DYNAMIC, ("float", 8, "tensor", False): STATIC}
    if found not in known:
        raise ConfigError(
            f"config.json's quantization_config rounds inputs to type {found[0]!r}, {found[1]} bits, strategy {found[2]!r}, "
            f"dynamic {found[3]} ({group}); served is float, 8, token and dynamic or tensor and not. Take a checkpoint of that form."
        )
    return known[found]
