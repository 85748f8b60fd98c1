"""Random checkpoints of architectures that Pelton has no model of, for transformers' modules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

VOCAB_SIZE = 320
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
_WINDOWS = {"sliding_window": 24}
_EXPERTS = {
    "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 48,
}  # fmt: skip
_OF_GPT2 = {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 512}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    # model_type: fields that differ from _COMMON (None: left out)
    "phi3": {},
    "granite": {"logits_scaling": 0.5, "attention_multiplier": 0.2, "embedding_multiplier": 3.0},
    "olmo2": {},
    "stablelm": {"use_qkv_bias": True},
    "cohere": {"logit_scale": 1.5},
    "starcoder2": _WINDOWS,
    "glm": {},
    "falcon": {"head_dim": None, "new_decoder_architecture": True, "num_kv_heads": 2},
    "gpt_neox": {},
    "gemma2": {**_WINDOWS, "num_hidden_layers": 4, "query_pre_attn_scalar": 24},
    "phi": {},
    "nemotron": {},
    "olmo": {},
    "helium": {},
    "smollm3": {"num_hidden_layers": 4},
    "ernie4_5": {},
    "seed_oss": {},
    "exaone4": {**_WINDOWS, "num_hidden_layers": 4},
    "mixtral": _EXPERTS,
    "qwen2_moe": _EXPERTS,
    "gpt2": {**_OF_GPT2, "head_dim": None, "hidden_size": None, "num_hidden_layers": None, "num_attention_heads": None},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "cohere2": {**_WINDOWS, "num_hidden_layers": 4, "logit_scale": 1.5},
    "persimmon": {},
}  # fmt: skip


def make_checkpoint(path: str | Path, model_type: str, *, seed: int = 1, **overrides: Any) -> str:
    """Save a random model whose greedy answers vary, without a tokenizer; `overrides` are config.json fields."""
    import torch
    import transformers

    fields = {**_COMMON, **ARCHITECTURES.get(model_type, {}), **overrides}
    config = transformers.AutoConfig.for_model(
        model_type, **{name: value for name, value in fields.items() if value is not None}
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if weight.dim() == 1:
                    weight.normal_(0.0 if name.endswith("bias") else 1.0, 0.2)
                elif any(
                    word in name for word in ("embed", "wte", "wpe", "lm_head")
                ):  # weak: sub-layers say what follows
                    weight.normal_(0.0, 0.15)
                else:
                    weight.normal_(0.0, 3.0 / weight.shape[-1] ** 0.5)
    model.save_pretrained(path)
    return str(path)
