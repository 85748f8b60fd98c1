"""GGUF tensor names as Hugging Face names, and which rows llama.cpp reordered."""

from __future__ import annotations

import re

from pelton.errors import ConfigError

GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
EXPERT_NAMES = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
"""Tensors of all experts of a layer, of which each is a matrix elsewhere."""
NOT_WEIGHTS = ("rope_freqs.weight",)  # read with the config
PERMUTED = {"llama": ("attn_q", "attn_k")}
"""llama.cpp rotates neighbouring pairs where Hugging Face rotates halves: conversion reorders the rows of each head."""

_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


def hf_name(name: str) -> str | None:
    """The Hugging Face name; None for a tensor that is not a weight. Raises `ConfigError` for an unknown one."""
    if name in NOT_WEIGHTS:
        return None
    if name in GLOBAL_NAMES:
        return GLOBAL_NAMES[name]
    match = _LAYER.fullmatch(name)
    if match is None or match[2] not in LAYER_NAMES:
        raise ConfigError(f"GGUF tensor {name!r} is not known for this architecture. Use the model's safetensors form.")
    return f"model.layers.{match[1]}.{LAYER_NAMES[match[2]]}.{match[3]}"


def expert_name(name: str, expert: int) -> str | None:
    """The Hugging Face name of one expert's matrix in a tensor that has those of all; None for another tensor."""
    match = _LAYER.fullmatch(name)
    if match is None or match[2] not in EXPERT_NAMES:
        return None
    return f"model.layers.{match[1]}.mlp.experts.{expert}.{EXPERT_NAMES[match[2]]}.{match[3]}"


def permuted_part(architecture: str, name: str) -> str | None:
    """ "attn_q" or "attn_k" when the rows of this tensor are reordered, else None."""
    match = _LAYER.fullmatch(name)
    part = match[2] if match else None
    return part if part in PERMUTED.get(architecture, ()) else None
