"""AWQ's checkpoints: 4 bits, groups with zero points, both packed along the rows of a matrix in an order of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from pelton.errors import ConfigError
from pelton_plugins.quantization.grouped import WHOLE, GroupedWeights, GroupForm, Numbers, read_bits, unpack_words
from pelton_plugins.quantization.module_names import is_part_of
from pelton_plugins.weight_forms.dummy import DummyTensor, group_scales

if TYPE_CHECKING:
    from torch import Tensor

    from pelton.config import EngineConfig
    from pelton.model.resolved import ResolvedModel
    from pelton.quantization.interface import LinearShard

PER_WORD = 8
PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in a word the number of each of eight rows is."""


def make_awq(config: EngineConfig, model: ResolvedModel) -> AWQWeights:
    """Make the method of a checkpoint whose quant_method is 'awq'."""
    settings = model.hf_config.get("quantization_config") or {}
    if settings.get("quant_method") != AWQWeights.name:
        raise ConfigError(
            "quantization is 'awq', and config.json has no quantization_config of it: weights are not quantized to AWQ while they "
            "load. Leave quantization unset."
        )
    return AWQWeights(settings)


class AWQWeights(GroupedWeights):
    """`qweight` [in, out / 8] int32, `qzeros` [groups, out / 8] int32, `scales` [groups, out]."""

    name: ClassVar[str] = "awq"

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """settings: config.json's quantization_config."""
        bits = read_bits(settings, "bits", self.name)
        if bits != 4:
            raise ConfigError(
                f"config.json's quantization_config (awq) has bits {bits}; AWQ has 4 here. Take such a checkpoint."
            )
        version = str(settings.get("version", "gemm")).lower()
        if version != "gemm":
            raise ConfigError(
                f"config.json's quantization_config (awq) has version {version!r}; served is 'gemm'. Take a checkpoint of that kind."
            )
        if not settings.get("zero_point", True):
            raise ConfigError("config.json's quantization_config (awq) has zero_point false; served is true.")
        self._form = GroupForm(bits, settings.get("group_size", 128) or WHOLE)
        self._left_out = tuple(settings.get("modules_to_not_convert") or ())

    def form(self, shard: LinearShard) -> GroupForm | None:
        return None if is_part_of(shard.name, self._left_out) else self._form

    def tensors(self, shard: LinearShard, form: GroupForm) -> Mapping[str, tuple[int, ...] | None]:
        groups = 1 if form.group_size == WHOLE else shard.num_cols // form.group_size
        words = shard.num_rows // PER_WORD
        return {"qweight": (shard.num_cols, words), "qzeros": (groups, words), "scales": (groups, shard.num_rows)}

    def dummy(self, shard: LinearShard, form: GroupForm) -> Mapping[str, DummyTensor | Tensor]:
        groups = 1 if form.group_size == WHOLE else shard.num_cols // form.group_size
        words = shard.num_rows // PER_WORD
        return {
            "qweight": DummyTensor((shard.num_cols, words), torch.int32), "qzeros": DummyTensor((groups, words), torch.int32),
            "scales": group_scales((groups, shard.num_rows), form.bits, torch.float16),
        }  # fmt: skip

    def numbers(self, shard: LinearShard, form: GroupForm, found: Mapping[str, Tensor]) -> Numbers:
        words = found["qweight"]

        def codes(rows: slice) -> Tensor:
            first, last = rows.start // PER_WORD, -(-rows.stop // PER_WORD)
            numbers = _unpack(words[:, first:last]).T
            return numbers[rows.start - first * PER_WORD :][: rows.stop - rows.start]

        return Numbers(codes, found["scales"].T, _unpack(found["qzeros"]).T)


def _unpack(words: Tensor) -> Tensor:
    """[n, out / 8] int32 -> [n, out]"""
    numbers = unpack_words(words, 4, 1).unflatten(1, (-1, PER_WORD))
    return numbers[:, :, torch.tensor(PLACES, device=words.device)].flatten(1)
