"""GPTQ's checkpoints: 4 or 8 bits in groups, packed along the columns of a matrix, which may have been quantized out of order."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from pelton.errors import ConfigError
from pelton_plugins.quantization.grouped import WHOLE, GroupedWeights, GroupForm, Numbers, read_bits, unpack_words
from pelton_plugins.quantization.module_names import is_part_of, matches
from pelton_plugins.weight_forms.dummy import DummyTensor, group_scales

if TYPE_CHECKING:
    from torch import Tensor

    from pelton.config import EngineConfig
    from pelton.model.build import BuildConfig
    from pelton.model.loading import LazyWeight
    from pelton.model.resolved import ResolvedModel
    from pelton.ops.interface import LinearWeights
    from pelton.quantization.interface import LinearShard

MISSING_FROM_ZEROS = {"gptq": 1, "gptq_v2": 0}
"""What a zero point is more than the number that the checkpoint has of it, by checkpoint_format."""
EXPERT = r".*\.experts\.\d+\.\w+"
ORDER = ".g_idx"
"""Behind a matrix's name: the group of each of its columns."""


def make_gptq(config: EngineConfig, model: ResolvedModel) -> GPTQWeights:
    """Make the method of a checkpoint whose quant_method is 'gptq'."""
    settings = model.hf_config.get("quantization_config") or {}
    if settings.get("quant_method") != GPTQWeights.name:
        raise ConfigError(
            "quantization is 'gptq', and config.json has no quantization_config of it: weights are not quantized to GPTQ while they "
            "load. Leave quantization unset."
        )
    return GPTQWeights(settings)


class GPTQWeights(GroupedWeights):
    """`qweight` [in bits / 32, out] int32, `qzeros` [groups, out bits / 32] int32, `scales` [groups, out], and where columns are out of
    order `g_idx` [in] int32."""

    name: ClassVar[str] = "gptq"

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """settings: config.json's quantization_config."""
        layout = settings.get("checkpoint_format") or "gptq"
        if layout not in MISSING_FROM_ZEROS:
            raise ConfigError(
                f"config.json's quantization_config has checkpoint_format {layout!r}; served are {', '.join(MISSING_FROM_ZEROS)}. "
                "Take a checkpoint of that kind."
            )
        self._more = MISSING_FROM_ZEROS[layout]
        self._form = _form(settings, self.name)
        self._rules: list[tuple[str, GroupForm | None]] = []
        """Of `dynamic`: the first pattern that fits a matrix says its form."""
        for pattern, changes in (settings.get("dynamic") or {}).items():
            is_kept = pattern.startswith("-:")
            form = None if is_kept else _form({**settings, **changes}, f"{self.name}, dynamic {pattern!r}")
            self._rules.append((pattern[2:] if pattern[:2] in ("-:", "+:") else pattern, form))
        self._has_head = bool(settings.get("lm_head"))
        self._left_out = tuple(settings.get("modules_to_not_convert") or ())

    def is_quantized_head(self, shard: LinearShard) -> bool:
        return self._has_head and shard.name.endswith("lm_head")

    def form(self, shard: LinearShard) -> GroupForm | None:
        return self._form_of(shard.name)

    def _form_of(self, name: str) -> GroupForm | None:
        if is_part_of(name, self._left_out):
            return None
        return next((form for pattern, form in self._rules if matches(pattern, name)), self._form)

    def create(
        self, config: BuildConfig, shards: Sequence[LinearShard], *, bias: bool, is_vocabulary: bool = False
    ) -> LinearWeights:
        config.weights.ignore(rf".*{re.escape(ORDER)}", self._check_order)
        config.weights.ignore(rf"{EXPERT}\.bias", _check_zero)  # some writers give each matrix a bias
        for shard in () if bias else shards:
            config.weights.ignore(rf"{re.escape(shard.name)}\.bias", _check_zero)
        return super().create(config, shards, bias=bias, is_vocabulary=is_vocabulary)

    def tensors(self, shard: LinearShard, form: GroupForm) -> Mapping[str, tuple[int, ...] | None]:
        groups = 1 if form.group_size == WHOLE else shard.num_cols // form.group_size
        per_word = 32 // form.bits
        wanted: dict[str, tuple[int, ...] | None] = {
            "qweight": (shard.num_cols // per_word, shard.num_rows), "qzeros": (groups, shard.num_rows // per_word),
            "scales": (groups, shard.num_rows),
        }  # fmt: skip
        return {**wanted, "g_idx": (shard.num_cols,)} if form.is_ordered else wanted

    def dummy(self, shard: LinearShard, form: GroupForm) -> Mapping[str, DummyTensor | Tensor]:
        wanted = self.tensors(shard, form)
        words, zeros, scales = (wanted[name] or () for name in ("qweight", "qzeros", "scales"))
        zero = 2 ** (form.bits - 1) - self._more  # in each byte of a word as often as it fits
        byte = zero if form.bits == 8 else zero << 4 | zero
        return {
            "qweight": DummyTensor(words, torch.int32),
            "qzeros": torch.full((*zeros, 4), byte, dtype=torch.uint8).view(torch.int32).squeeze(-1),
            "scales": group_scales(scales, form.bits, torch.float16),
            "g_idx": torch.arange(shard.num_cols, dtype=torch.int32) // max(form.group_size, 1),
        }

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
        return Numbers(codes, found["scales"].T, zeros, found.get("g_idx"))

    def _check_order(self, name: str, weight: LazyWeight) -> None:
        """Refuse another order of a matrix that config.json says is in order."""
        form = self._form_of(name.removesuffix(ORDER))
        if form is None or form.is_ordered:  # of a layer that another rank has
            return
        group_of = weight.read().to(torch.int64)
        size = len(group_of) if form.group_size == WHOLE else form.group_size
        if not torch.equal(group_of, torch.arange(len(group_of)) // size):
            raise ConfigError(
                f"{name} is not in order, and config.json's quantization_config says desc_act false. Set desc_act true there."
            )


def _form(settings: Mapping[str, Any], method: str) -> GroupForm:
    group_size = settings.get("group_size", WHOLE)
    return GroupForm(
        read_bits(settings, "bits", method), group_size, is_symmetric=bool(settings.get("sym", True)),
        is_ordered=bool(settings.get("desc_act")) and group_size != WHOLE,
    )  # fmt: skip


def _check_zero(name: str, weight: LazyWeight) -> None:
    if weight.read().any():
        raise ConfigError(
            f"The checkpoint has {name}, which is not zero, and config.json makes a model without it. Check that config.json belongs to "
            "these weights."
        )
