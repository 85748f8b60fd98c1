"""AWQ, GPTQ, packed compressed-tensors and bitsandbytes matrices, written by the formats' published layouts."""

import json
from dataclasses import dataclass, field

import numpy as np
import torch

# QLoRA (arXiv:2305.14314), appendix E.
NF4 = [
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224, 0.44070982933044434,
    0.5626170039176941, 0.7229568362236023, 1.0,
]  # fmt: skip


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


def four_bits(weight, settings, block=64, nested=256):
    table, flat = torch.tensor(NF4), weight.flatten()
    largest = torch.nn.functional.pad(flat, (0, -len(flat) % block)).view(-1, block).abs().amax(1)
    state = {"quant_type": "nf4", "blocksize": block, "dtype": "bfloat16", "shape": list(weight.shape)}
    found = {"weight.absmax": largest, "weight.quant_map": table}
    if settings.get("bnb_4bit_use_double_quant"):
        offset, outer = largest.mean().item(), torch.linspace(-1, 1, 256)
        rest = torch.nn.functional.pad(largest - offset, (0, -len(largest) % nested)).view(-1, nested)
        most = rest.abs().amax(1)
        codes = (rest / most[:, None]).flatten()[: len(largest)].sub(outer[:, None]).abs().argmin(0)
        largest = outer[codes] * most.repeat_interleave(nested)[: len(largest)] + offset
        state |= {"nested_blocksize": nested, "nested_dtype": "float32", "nested_offset": offset}
        found |= {
            "weight.absmax": codes.to(torch.uint8),
            "weight.nested_absmax": most,
            "weight.nested_quant_map": outer,
        }
    spread = largest.repeat_interleave(block)[: len(flat)]
    codes = (flat / spread).sub(table[:, None]).abs().argmin(0)
    found["weight"] = (codes[::2] << 4 | codes[1::2]).to(torch.uint8).unsqueeze(1)
    blob = json.dumps(state).encode()
    found["weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(blob), dtype=torch.uint8)
    return found, (table[codes] * spread).view(weight.shape)


# Of a matrix: (tensors of the checkpoint by name, what they say)


def int8_rows(weight):
    """What bitsandbytes and int-quantized have alike: (codes, the largest number of each row, what they say)"""
    largest = weight.abs().amax(1).half().float()
    codes = (weight / largest[:, None] * 127).round().clamp(-127, 127)
    return codes.to(torch.int8), largest, codes * (largest / 127)[:, None]


def grouped_tensors(form):
    def make(module, weight):
        made = quantize(weight, form, len(module))
        return {f"{module}.{name}": part for name, part in tensors_of(made, form).items()}, made.weight

    return make


def bitsandbytes_tensors(module, weight):
    codes, largest, said = int8_rows(weight)
    return {f"{module}.weight": codes, f"{module}.SCB": largest, f"{module}.weight_format": torch.tensor(0)}, said


def int_quantized_tensors(module, weight):
    codes, largest, said = int8_rows(weight)
    return {f"{module}.weight": codes, f"{module}.weight_scale": (largest / 127)[:, None]}, said


def nf4_tensors(*, is_double=False):
    def make(module, weight):
        found, said = four_bits(weight, {"bnb_4bit_use_double_quant": is_double})
        return {f"{module}.{name}": part for name, part in found.items()}, said

    return make
