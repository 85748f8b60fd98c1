"""AWQ, GPTQ and packed compressed-tensors matrices, written by the formats' published layouts."""

from dataclasses import dataclass, field

import numpy as np
import torch


@dataclass(frozen=True)
class Form:
    method: str
    bits: int = 4
    group: int = 32
    is_symmetric: bool = False
    is_ordered: bool = False
    settings: dict = field(default_factory=dict)  # over those of the method
    kept: tuple[str, ...] = ("lm_head",)

    @property
    def config(self):
        if self.method == "awq":
            return {
                "quant_method": "awq",
                "bits": 4,
                "group_size": self.group,
                "version": "gemm",
                "zero_point": True,
            } | self.settings
        if self.method == "gptq":
            return {
                "quant_method": "gptq", "bits": self.bits, "group_size": self.group, "sym": self.is_symmetric,
                "desc_act": self.is_ordered,
            } | self.settings  # fmt: skip
        weights = {
            "type": "int", "num_bits": self.bits, "symmetric": self.is_symmetric, "group_size": None if self.group == -1 else self.group,
            "strategy": "channel" if self.group == -1 else "group", "actorder": "group" if self.is_ordered else None,
        }  # fmt: skip
        return {
            "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        } | self.settings  # fmt: skip


@dataclass
class Quantized:
    codes: np.ndarray  # [out, in]
    scales: np.ndarray  # [out, groups] float16
    zeros: np.ndarray  # [out, groups]
    group_of: np.ndarray  # [in]

    @property
    def weight(self):
        scales, zeros = self.scales.astype(np.float32), self.zeros.astype(np.float32)
        return torch.from_numpy((self.codes - zeros[:, self.group_of]) * scales[:, self.group_of]).float()


def quantize(weight, form, seed):
    """Rounded to nearest; of an ordered form columns belong to groups by chance, alike for matrices of one seed."""
    weight = weight.float().numpy()
    size = weight.shape[1] if form.group == -1 else form.group
    group_of = np.arange(weight.shape[1]) // size
    if form.is_ordered:
        group_of = np.random.default_rng(seed).permutation(group_of)
    most, groups = 2**form.bits - 1, weight.shape[1] // size
    scales = np.zeros((weight.shape[0], groups), np.float16)
    zeros = np.full((weight.shape[0], groups), 2 ** (form.bits - 1), np.int64)
    for group in range(groups):
        part = weight[:, group_of == group]
        low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
        if form.is_symmetric:
            scales[:, group] = np.abs(part).max(1) / (2 ** (form.bits - 1) - 0.5)
        else:
            scales[:, group] = (high - low) / most
            zeros[:, group] = np.clip(np.round(-low / scales[:, group].astype(np.float32)), 1, most)
    exact = scales.astype(np.float32)[:, group_of]
    codes = np.clip(np.round(weight / exact) + zeros[:, group_of], 0, most).astype(np.int64)
    return Quantized(codes, scales, zeros, group_of)


def words(numbers, bits, places=None):
    """[n, m] -> [n, m bits / 32] int32; places: where in a word each number goes."""
    per_word = 32 // bits
    places = places or range(per_word)
    result = np.zeros((numbers.shape[0], numbers.shape[1] // per_word), np.uint64)
    for index in range(per_word):
        result |= numbers[:, index::per_word].astype(np.uint64) << np.uint64(bits * places[index])
    return torch.from_numpy(result.astype(np.uint32).view(np.int32))


def tensors_of(made, form):
    scales = torch.from_numpy(made.scales)
    if form.method == "awq":
        # AutoAWQ, WQLinear_GEMM: number order_map[i] of eight goes to place i; order_map is 0 2 4 6 1 3 5 7.
        places = [[0, 2, 4, 6, 1, 3, 5, 7].index(index) for index in range(8)]
        return {
            "qweight": words(made.codes.T, 4, places), "qzeros": words(made.zeros.T, 4, places), "scales": scales.T,
        }  # fmt: skip
    if form.method == "gptq":
        less = 0 if form.settings.get("checkpoint_format") == "gptq_v2" else 1
        return {
            "qweight": words(made.codes, form.bits).T, "qzeros": words((made.zeros - less).T, form.bits), "scales": scales.T,
            "g_idx": torch.from_numpy(made.group_of.astype(np.int32)),
        }  # fmt: skip
    found = {
        "weight_packed": words(made.codes, form.bits), "weight_scale": scales, "weight_shape": torch.tensor(made.codes.shape),
    }  # fmt: skip
    if not form.is_symmetric:
        found["weight_zero_point"] = words(made.zeros.T, form.bits).T
    if form.is_ordered:
        found["weight_g_idx"] = torch.from_numpy(made.group_of.astype(np.int32))
    return found
