"""Small random checkpoints of any causal language model of transformers: its default configuration with each size made small."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

VOCAB_SIZE = 331  # no multiple of anything
NUM_POSITIONS = 512
WINDOW = 23
NUM_LAYERS = 3
_SIZES: dict[int, tuple[str, ...]] = {
    VOCAB_SIZE: (
        "vocab_size", "vocab_size_per_layer_input", "decoder_vocab_size", "unpadded_vocab_size",
    ),
    NUM_POSITIONS: (
        "max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "model_max_length",
        "max_target_positions", "context_length",
    ),
    WINDOW: (
        "sliding_window", "window_size", "local_attention", "attention_window_size", "attention_chunk_size",
        "sliding_window_size", "keep_window_size", "rel_extent", "local_attn_chunk_length",
        "lsh_attn_chunk_length",
    ),
    64: (
        "hidden_size", "d_model", "n_embd", "emb_dim", "embedding_size", "attention_hidden_size", "lru_width",
        "embedding_dim", "word_embed_proj_dim", "input_embedding_size", "output_embedding_size",
        "backbone_hidden_size", "mamba_d_ssm", "cross_attention_hidden_size", "embed_dim", "out_hidden_size",
        "encoder_hidden_size", "projection_dim", "mm_embed_dim", "projector_hidden_size",
    ),
    96: (
        "intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "ffn_hidden_size", "dff",
        "dim_ff", "d_inner", "shared_intermediate_size", "dense_intermediate_size", "intermediate_size_mlp",
        "prefix_dense_intermediate_size", "feed_forward_size",
    ),
    48: (
        "moe_intermediate_size", "shared_expert_intermediate_size", "shared_experts_intermediate_size",
        "expert_ffn_hidden_size", "moe_shared_expert_intermediate_size",
    ),
    4: (
        "num_attention_heads", "n_head", "n_heads", "decoder_attention_heads", "encoder_attention_heads",
        "attention_heads", "num_encoder_attention_heads", "num_decoder_attention_heads",
        "swa_num_attention_heads", "linear_num_value_heads", "linear_num_heads", "zero_expert_num",
        "encoder_hash_byte_group_vocab", "mamba_dt_rank", "time_step_rank", "patch_size", "num_centroids",
        "top_k_ngrams", "num_image_tokens", "mm_tokens_per_image",
    ),
    2: (
        "indexer_n_heads", "indexer_kv_heads", "num_key_value_heads", "num_kv_heads", "kv_n_heads",
        "swa_num_key_value_heads", "num_query_groups", "linear_num_key_heads", "num_experts_per_tok",
        "num_experts_per_token", "moe_topk", "moe_k", "moe_top_k", "top_k_experts", "n_group",
        "num_expert_group", "n_groups", "o_groups", "index_topk_blocks", "layer_group_size", "n_input_layers",
        "n_recurrent_layers", "n_output_layers", "n_layers_per_attn_res_block", "attn_layer_period",
        "adapter_rank",
    ),
    1: (
        "topk_group", "n_shared_experts", "first_k_dense_replace", "moe_layer_start_index",
        "attn_layer_offset", "num_dense_layers",
    ),
    16: (
        # with few heads of an indexer, many scores of tokens are 0 alike
        "index_n_heads", "indexer_head_dim", "head_dim", "kv_channels", "qk_rope_head_dim", "dim_head",
        "d_head", "attention_head_size", "linear_key_head_dim", "linear_value_head_dim", "linear_head_dim",
        "mamba_d_head", "mamba_head_dim", "mamba_headdim", "mamba_d_state", "state_size", "ssm_state_size",
        "swa_head_dim", "global_head_dim", "kv_lora_rank", "hidden_size_per_layer_input",
        "router_hidden_size", "index_block_size", "loop_gate_rank", "laurel_rank", "rotary_dim",
        "o_lora_rank", "image_size", "hc_lowrank",
    ),
    24: (
        "q_lora_rank", "qk_nope_head_dim", "index_topk", "query_pre_attn_scalar",
    ),
    20: (
        "v_head_dim",
    ),
    40: (
        "qk_head_dim",
    ),
    32: (
        "index_head_dim", "mamba_chunk_size", "chunk_size", "block_size", "attention_head_dim",
    ),
    8: (
        "indexer_budget", "num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts",
        "num_heads", "mamba_n_heads", "mamba_num_heads", "floor_scale", "log_scaling_n_floor", "d_rel",
    ),
}  # fmt: skip
SIZES = {name: size for size, names in _SIZES.items() for name in names}
DEPTHS = (
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers", "num_encoder_layers",
    "num_decoder_layers", "depth", "max_window_layers", "moe_layer_end_index",
)  # fmt: skip
LEFT_OUT = {
    "transformers_version",
    "id2label",
    "label2id",
    "architectures",
    "ignore_keys_at_rope_validation",
    "dtype",
    "return_dict",
}
NO_MTP = {"num_nextn_predict_layers": 0, "num_mtp_layers": 0}
"""Layers behind the last one, which answer nothing."""
LEFT: Any = object()
"""In the place of an override: the field is left out."""
WHERE_NONE = {
    "head_dim", "num_key_value_heads", "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "n_shared_experts",
    "first_k_dense_replace", "indexer_n_heads", "indexer_kv_heads", "indexer_head_dim",
}  # fmt: skip
"""Sizes that are stated where the default has none."""
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_MROPE = {"text_config": {"rope_parameters": {**_ROPE, "mrope_section": [4, 2, 2]}}}
_HALF_MROPE = {"text_config": {"rope_parameters": {**_ROPE, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}}}
ODD: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "paddleocr_vl", "qwen2_5_omni_thinker"), _MROPE),
    **dict.fromkeys(("glm4v", "glm4v_moe", "glm46v", "glm_ocr"), _HALF_MROPE),
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}},
    "dory": {"num_hidden_layers": 6, "layer_types": LEFT},
    "olmo_hybrid": {"linear_num_value_heads": 2},  # transformers saves its convolutions in thirds, whatever their sizes
    "zamba2": {"attention_hidden_size": LEFT},
    "xmod": {"default_language": "en_XX"},
    "reformer": {"axial_pos_embds": False, "attn_layers": ["local", "lsh", "local"]},
    "dots3_note_text": {"num_key_value_heads": 4},
    "gemma3n_text": {
        "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0], "intermediate_size": [96] * 4,
    },
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"]},
}  # fmt: skip
"""Fields of model types that sizes alone do not make small, or right."""


def small_fields(config: Any) -> dict[str, Any]:
    """Return the fields of a default configuration that make it small."""
    import transformers

    given = {name: value for name, value in vars(config).items() if not name.startswith("_") and name not in LEFT_OUT}
    depth = next((given[name] for name in DEPTHS if given.get(name)), 0)
    kinds = {
        name: value
        for name, value in given.items()
        if depth > 1 and isinstance(value, list | tuple) and len(value) == depth
    }
    layers = _layers_of_each_kind(kinds, depth)
    fields: dict[str, Any] = {}
    for name, value in given.items():
        if isinstance(value, transformers.PreTrainedConfig):
            fields[name] = _merged(value.to_dict(), small_fields(value))  # its defaults here are not those of its type
        elif name in kinds:
            fields[name] = [value[index] for index in layers]
        elif name in DEPTHS and value:
            fields[name] = len(layers) if layers else NUM_LAYERS
        elif name in NO_MTP and value:
            fields[name] = 0
        elif name == "rope_parameters" and isinstance(value, dict):
            fields[name] = _small_rope(value, given)
        elif name == "is_decoder":
            fields[name] = True
        elif name == "num_key_value_heads" and given.get("kv_lora_rank"):
            fields[name] = SIZES["num_attention_heads"]
        elif name in SIZES and (
            (type(value) is int and (value > SIZES[name] or SIZES[name] == NUM_POSITIONS))
            or (value is None and name in WHERE_NONE)
        ):
            fields[name] = SIZES[name]
        elif name in SIZES and type(value) is list:
            fields[name] = [SIZES[name]] * (len(layers) or NUM_LAYERS)
        elif name.endswith("token_id") and type(value) is int and value >= VOCAB_SIZE:
            fields[name] = 3
    return fields


def _small_rope(rope: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    if any(isinstance(value, dict) for value in rope.values()):
        return {name: _small_rope(value, given) if isinstance(value, dict) else value for name, value in rope.items()}
    if not rope.get("mrope_section"):
        return dict(rope)
    pairs = (
        int(SIZES["head_dim"] * (rope.get("partial_rotary_factor") or given.get("partial_rotary_factor") or 1.0)) // 2
    )
    return {**rope, "mrope_section": [pairs - 2 * (pairs // 4), pairs // 4, pairs // 4]}


def _layers_of_each_kind(kinds: Mapping[str, Any], depth: int) -> list[int]:
    """Return places of layers among which each kind is, in their order; at least three where there are that many."""
    seen: dict[str, int] = {}
    for index in range(depth if kinds else 0):
        seen.setdefault(repr([value[index] for value in kinds.values() if isinstance(value[index], str)]), index)
    places = sorted(seen.values())[:6]
    more = (index for index in range(depth if kinds else 0) if index not in places)
    while len(places) < min(NUM_LAYERS, depth if kinds else 0):
        places = sorted([*places, next(more)])
    return places


def small_config(model_type: str, **overrides: Any) -> Any:
    import transformers

    kind = transformers.CONFIG_MAPPING[model_type]
    fields = _merged(_merged(small_fields(kind()), ODD.get(model_type, {})), overrides)
    return kind(**{name: value for name, value in fields.items() if value is not LEFT})


def _merged(fields: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    parts = {
        name: _merged(fields[name], value)
        for name, value in changes.items()
        if name.endswith("_config") and isinstance(fields.get(name), dict)
    }
    return {**fields, **changes, **parts}


def fill(model: Any, seed: int = 1) -> None:
    """Give a model random weights with which its greedy answers vary."""
    import torch

    torch.manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 1:
                weight.normal_(0.0 if name.endswith("bias") else 1.0, 0.2)
            elif any(word in name for word in ("embed", "wte", "wpe", "lm_head")):  # weak: sub-layers say what follows
                weight.normal_(0.0, 0.15)
            else:
                weight.normal_(0.0, 3.0 / weight.shape[-1] ** 0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.2)


@dataclasses.dataclass(frozen=True)
class Saving:
    """How a checkpoint is written."""

    dtype: str = "float32"
    shard_size: str = "5GB"
    dtype_key: str = "dtype"


_ROPES = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 8.0, "original_max_position_embeddings": 64},
    "llama3": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
    },
    "longrope": {
        "factor": 8.0, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "original_max_position_embeddings": 4,
    },
}  # fmt: skip
HABITS: dict[str, dict[str, Any]] = {
    "tied": {"tie_word_embeddings": True},
    "untied": {"tie_word_embeddings": False},
    "sharded": {"saving": Saving(shard_size="60KB")},
    "bfloat16": {"saving": Saving(dtype="bfloat16")},
    "torch_dtype": {"saving": Saving(dtype="bfloat16", dtype_key="torch_dtype")},
    **{f"rope {kind}": {"rope_parameters": {**_ROPE, **rope, "rope_type": kind}} for kind, rope in _ROPES.items()},
    "partial rotary": {"rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5}},
    "no head_dim": {"head_dim": None},
    "wide heads": {"head_dim": 32},
    "one KV head": {"num_key_value_heads": 1},
    "as many KV heads": {"num_key_value_heads": 4},
    "attention biases": {"attention_bias": True},
    "MLP biases": {"mlp_bias": True},
    "clipped": {"clip_qkv": 2.0},
    "odd vocabulary": {"vocab_size": 257},
    "no windows": {"sliding_window": None},
}
"""What checkpoints of one model type differ in: fields, and how they are written. Each is for types that have its fields."""


def has_habit(model_type: str, habit: str) -> bool:
    """Return whether a model type has all fields of a habit, rope scaling where all layers turn alike."""
    own = vars(small_config(model_type))
    rope = own.get("rope_parameters")
    if "rope_parameters" in HABITS[habit] and (
        not isinstance(rope, dict) or any(isinstance(x, dict) for x in rope.values())
    ):
        return False
    return all(name in own or name == "saving" for name in HABITS[habit])


def class_of(config: Any, *, reads_more: bool = False) -> Any:
    """transformers' class for a configuration. reads_more: of models that read images or sound as well."""
    import transformers

    readers = (transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, transformers.MODEL_FOR_MULTIMODAL_LM_MAPPING)
    mappings = readers if reads_more else (transformers.MODEL_FOR_CAUSAL_LM_MAPPING,)
    return next(mapping[type(config)] for mapping in mappings if type(config) in mapping)


def make_small(
    path: str | Path, model_type: str, *, saving: Saving = Saving(), reads_more: bool = False, **overrides: Any
) -> str:
    """Save a small random model of a type, without a tokenizer. reads_more: see `class_of`."""
    import torch

    config = small_config(model_type, **overrides)
    kind = class_of(config, reads_more=reads_more)
    if not isinstance(config, kind.config_class):
        config = config.get_text_config(decoder=True)
    model = kind._from_config(config)
    fill(model)
    model.to(getattr(torch, saving.dtype)).save_pretrained(path, max_shard_size=saving.shard_size)
    file = Path(path) / "config.json"
    file.write_text(file.read_text().replace('"dtype":', f'"{saving.dtype_key}":'))
    return str(path)
