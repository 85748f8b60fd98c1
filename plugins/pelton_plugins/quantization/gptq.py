"""GPTQ's checkpoints: 4 or 8 bits in groups, packed along the columns of a matrix, which may have been quantized out of order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from pelton.errors import ConfigError
from pelton_plugins.quantization.fp8 import is_part_of
from pelton_plugins.quantization.grouped import WHOLE, GroupedWeights, GroupForm, Numbers, read_bits, unpack_words

if TYPE_CHECKING:
    from torch import Tensor

    from pelton.config import EngineConfig
    from pelton.model.resolved import ResolvedModel
    from pelton.quantization.interface import LinearShard

MISSING_FROM_ZEROS = {"gptq": 1, "gptq_v2": 0}
"""What a zero point is more than the number that the checkpoint has of it, by checkpoint_format."""


class GPTQWeights(GroupedWeights):
    """`qweight` [in bits / 32, out] int32, `qzeros` [groups, out bits / 32] int32, `scales` [groups, out], `g_idx` [in] int32."""

    name: ClassVar[str] = "gptq"

    def __init__(self, config: EngineConfig, model: ResolvedModel) -> None:
        settings = model.hf_config.get("quantization_config") or {}
        if settings.get("quant_method") != self.name:
            raise ConfigError(
                "quantization is 'gptq', and config.json has no quantization_config of it: weights are not quantized to GPTQ while they "
                "load. Leave quantization unset."
            )
        layout = settings.get("checkpoint_format") or "gptq"
        if layout not in MISSING_FROM_ZEROS:
            raise ConfigError(
                f"config.json's quantization_config has checkpoint_format {layout!r}; served are {', '.join(MISSING_FROM_ZEROS)}. "
                "Take a checkpoint of that kind."
            )
        if settings.get("dynamic"):
            raise ConfigError(
                "config.json's quantization_config has a field dynamic, by which matrices differ in their bits; served are checkpoints "
                "that quantize all alike. Take such a one."
            )
        self._more = MISSING_FROM_ZEROS[layout]
        group_size = settings.get("group_size", WHOLE)
        self._form = GroupForm(
            read_bits(settings, "bits", self.name), group_size, is_symmetric=bool(settings.get("sym", True)),
            is_ordered=bool(settings.get("desc_act")) and group_size != WHOLE,
        )  # fmt: skip
        self._has_head = bool(settings.get("lm_head"))
        self._left_out = tuple(settings.get("modules_to_not_convert") or ())

    def is_quantized_head(self, shard: LinearShard) -> bool:
        return self._has_head and shard.name.endswith("lm_head")

    def form(self, shard: LinearShard) -> GroupForm | None:
        return None if is_part_of(shard.name, self._left_out) else self._form

    def tensors(self, shard: LinearShard, form: GroupForm) -> Mapping[str, tuple[int, ...] | None]:
        groups = 1 if form.group_size == WHOLE else shard.num_cols // form.group_size
        per_word = 32 // form.bits
        return {
            "qweight": (shard.num_cols // per_word, shard.num_rows), "qzeros": (groups, shard.num_rows // per_word),
            "scales": (groups, shard.num_rows), "g_idx": (shard.num_cols,),
        }  # fmt: skip

    def numbers(self, shard: LinearShard, form: GroupForm, found: Mapping[str, Tensor]) -> Numbers:
        words = found["qweight"]

        def codes(rows: slice) -> Tensor:
            return unpack_words(words[:, rows], form.bits, 0).T

        zeros = unpack_words(found["qzeros"], form.bits, 1).T + self._more
        if form.is_symmetric and (zeros != 2 ** (form.bits - 1)).any():
            raise ConfigError(
                f"{shard.name}.qzeros has zero points other than {2 ** (form.bits - 1)}, and config.json's quantization_config says "
                "sym true. Check that config.json belongs to these weights, and its checkpoint_format."
            )
        group_of = found["g_idx"]
        if not form.is_ordered:
            size = shard.num_cols if form.group_size == WHOLE else form.group_size
            if (group_of[1:] < group_of[:-1]).any() or int(group_of[-1]) != shard.num_cols // size - 1:
                raise ConfigError(
                    f"{shard.name}.g_idx is not in order, and config.json's quantization_config says desc_act false. "
                    "Set desc_act true there."
                )
        return Numbers(codes, found["scales"].T, zeros, group_of if form.is_ordered else None)
