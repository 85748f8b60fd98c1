"""GGUF metadata as config.json's fields."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

from pelton.errors import ConfigError
from pelton_plugins.loaders.gguf.file import GGUFFile, TensorInfo

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
}
MODEL_TYPES = {"qwen3moe": "qwen3_moe"}
"""Where another than the architecture's name."""
ROPE_THETA_DEFAULT = 10_000.0
LLAMA3_LOW_FREQ, LLAMA3_HIGH_FREQ, LLAMA3_CONTEXT = 1.0, 4.0, 8192


def hf_config(file: GGUFFile) -> dict[str, Any]:
    """Return what config.json would say. Raises `ConfigError` naming a field that is missing."""
    arch = file.architecture
    if arch not in ARCHITECTURES:
        raise ConfigError(
            f"{file.path} is of GGUF architecture {arch!r}; {', '.join(ARCHITECTURES)} are read. "
            "Use the model's safetensors form."
        )
    fields = _Fields(file, arch)
    num_heads = fields.integer("attention.head_count")
    hidden_size = fields.integer("embedding_length")
    head_dim = fields.integer("attention.key_length", hidden_size // num_heads)
    embedding = tensor(file, "token_embd.weight")
    context = fields.integer("context_length")
    theta = fields.number("rope.freq_base", ROPE_THETA_DEFAULT)
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[arch]],
        "model_type": MODEL_TYPES.get(arch, arch),
        "hidden_size": hidden_size,
        "intermediate_size": fields.integer("feed_forward_length", fields.values.get("expert_feed_forward_length")),
        "num_hidden_layers": fields.integer("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": fields.integer("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon", 1e-5),
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(file, fields, context, theta, head_dim),
        "max_position_embeddings": context,
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        "torch_dtype": "bfloat16",
    }
    if arch == "qwen3moe":
        config |= {
            "num_experts": fields.integer("expert_count"), "num_experts_per_tok": fields.integer("expert_used_count"),
            "moe_intermediate_size": fields.integer("expert_feed_forward_length"), "norm_topk_prob": True,
            "decoder_sparse_step": 1, "mlp_only_layers": [],
        }  # fmt: skip
    for name in ("bos", "eos"):
        token_id = file.get(f"tokenizer.ggml.{name}_token_id")
        if token_id is not None:
            config[f"{name}_token_id"] = token_id
    also = [file.get(f"tokenizer.ggml.{name}_token_id") for name in ("eot", "eom")]
    ends = [token_id for token_id in dict.fromkeys([config.get("eos_token_id"), *also]) if token_id is not None]
    if len(ends) > 1:
        config["eos_token_id"] = ends
    return config


def tensor(file: GGUFFile, name: str) -> TensorInfo:
    found = file.tensors.get(name)
    if found is None:
        raise ConfigError(f"{file.path} has no tensor {name!r}; it is incomplete, or holds no language model.")
    return found


class _Fields:
    """The architecture's own metadata, with checked types."""

    def __init__(self, file: GGUFFile, arch: str) -> None:
        self._file = file
        self._arch = arch
        self.values: Mapping[str, Any] = file.section(arch)

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.values.get(key, default)
        if isinstance(value, list) and len(set(value)) == 1:
            value = value[0]  # one per layer, all equal
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{self._file.path}: {self._arch}.{key} is {value!r}; expected a positive integer.")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.values.get(key, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not value > 0:
            raise ConfigError(f"{self._file.path}: {self._arch}.{key} is {value!r}; expected a positive number.")
        return _shortest(float(value))


def _shortest(value: float) -> float:
    """The shortest decimal that is the same float32: 1e-05 rather than 9.999999747378752e-06."""
    packed = struct.pack("<f", value)
    for digits in range(1, 10):
        candidate = float(f"{value:.{digits}g}")
        if struct.pack("<f", candidate) == packed:
            return candidate
    return value


def _rope_scaling(file: GGUFFile, fields: _Fields, context: int, theta: float, head_dim: int) -> dict[str, Any] | None:
    if "rope_freqs.weight" in file.tensors:
        return _llama3_scaling(file, theta, head_dim)
    kind = fields.values.get("rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise ConfigError(
            f"{file.path}: RoPE scaling {kind!r} is not read; linear and yarn are. Use the safetensors form."
        )
    factor = fields.number("rope.scaling.factor", 1.0)
    original = fields.integer("rope.scaling.original_context_length", context)
    return {"rope_type": kind, "factor": factor, "original_max_position_embeddings": original}


def _llama3_scaling(file: GGUFFile, theta: float, head_dim: int) -> dict[str, Any]:
    """Llama 3's scaling from the divisors that the file holds in its place; its parameters are confirmed by them."""
    from math import pi

    info = tensor(file, "rope_freqs.weight")
    if info.quant_type.name != "F32" or info.shape != (head_dim // 2,):
        raise ConfigError(
            f"{file.path}: rope_freqs.weight is {info.quant_type.name} {list(info.shape)}; expected F32 [{head_dim // 2}]."
        )
    divisors = struct.unpack_from(f"<{head_dim // 2}f", file.data, info.start)
    factor = _shortest(max(divisors))
    for index, divisor in enumerate(divisors):
        wavelength = 2 * pi * theta ** (2 * index / head_dim)
        position = (LLAMA3_CONTEXT / wavelength - LLAMA3_LOW_FREQ) / (LLAMA3_HIGH_FREQ - LLAMA3_LOW_FREQ)
        smooth = min(1.0, max(0.0, position))
        expected = 1.0 / ((1.0 - smooth) / factor + smooth)
        if abs(divisor - expected) > 1e-3 * expected:
            raise ConfigError(
                f"{file.path}: rope_freqs.weight is not Llama 3's scaling over {LLAMA3_CONTEXT} tokens "
                f"(entry {index} is {divisor:g}, expected {expected:g}). Use the safetensors form."
            )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": LLAMA3_LOW_FREQ,
        "high_freq_factor": LLAMA3_HIGH_FREQ,
        "original_max_position_embeddings": LLAMA3_CONTEXT,
    }
