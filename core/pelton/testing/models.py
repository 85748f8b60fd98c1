"""Make tiny random checkpoints of real architectures, and ask transformers what they say.

The reference for equality tests: `make_tiny_checkpoint` saves a folder as a user would download it
(config.json, safetensors, tokenizer with chat template), `reference_greedy` and `reference_logits`
run transformers' float32 model on it. Needs the `test` extra; nothing in the engine imports this.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

VOCAB_SIZE = 320
PAD_ID, BOS_ID, EOS_ID = 0, 1, 2
SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": PAD_ID,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4, "kv_lora_rank": 32, "qk_nope_head_dim": 24, "qk_rope_head_dim": 16, "v_head_dim": 20,
    "head_dim": 16, "first_k_dense_replace": 4, "tie_word_embeddings": True,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64,
        "mscale": 1.0, "mscale_all_dim": 0.7, "beta_fast": 32, "beta_slow": 1,
    },
}  # fmt: skip
"""DeepSeek's attention over latents, with dense MLPs; yarn's scale enters the logits as well as the rope."""
_EXPERTS: dict[str, Any] = {
    "num_experts": 8, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40,
}  # fmt: skip
_SHARED: dict[str, Any] = {
    "n_shared_experts": 2, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
}  # fmt: skip
_OTHER_LATENT: dict[str, Any] = {
    "swa_num_attention_heads": 2, "swa_num_key_value_heads": 2, "swa_q_lora_rank": 28, "swa_kv_lora_rank": 48, "swa_head_dim": 32,
    "swa_qk_nope_head_dim": 20, "swa_v_head_dim": 12, "swa_rope_theta": 500.0,
}  # fmt: skip
"""Of dots3-note's layers with windows."""
_PIXTRAL: dict[str, Any] = {
    "model_type": "pixtral", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 16,
    "image_size": 28, "patch_size": 14,
}  # fmt: skip
_INDEXER: dict[str, Any] = {"index_topk": 16, "index_n_heads": 16, "index_head_dim": 24}
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    # family: (config class, model class, fields that differ from _COMMON)
    "llama": ("LlamaConfig", "LlamaForCausalLM", {"tie_word_embeddings": True}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {"sliding_window": 24, "head_dim": 24}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 32, "num_key_value_heads": 1}),
    "gemma3": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {"num_hidden_layers": 6, "sliding_window": 32, "query_pre_attn_scalar": 24},
    ),
    "gemma4": (
        "Gemma4TextConfig",
        "Gemma4ForCausalLM",
        {
            "num_hidden_layers": 8,
            "sliding_window": 32,
            "num_kv_shared_layers": 4,
            "global_head_dim": 32,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"] * 2,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB_SIZE,
            "use_double_wide_mlp": True,
            "tie_word_embeddings": True,
        },
    ),
    "smollm3": ("SmolLM3Config", "SmolLM3ForCausalLM", {"no_rope_layers": [1, 0, 1, 1], "attention_bias": True}),
    "seed_oss": ("SeedOssConfig", "SeedOssForCausalLM", {"head_dim": 24, "attention_out_bias": False}),
    "granite": (
        "GraniteConfig",
        "GraniteForCausalLM",
        {"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.6, "logits_scaling": 0.5},
    ),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", {"partial_rotary_factor": 0.5, "sliding_window": 40}),
    "ernie4_5": ("Ernie4_5Config", "Ernie4_5ForCausalLM", {"use_bias": True}),
    "glm4": ("Glm4Config", "Glm4ForCausalLM", {"attention_bias": True, "partial_rotary_factor": 0.5}),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", {}),
    "cohere2": ("Cohere2Config", "Cohere2ForCausalLM", {"sliding_window": 24, "logit_scale": 0.7}),
    "starcoder2": ("Starcoder2Config", "Starcoder2ForCausalLM", {"sliding_window": 24, "use_bias": True}),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", {"sliding_window": 32, "query_pre_attn_scalar": 24}),
    "gemma3n": (
        "Gemma3nTextConfig",
        "Gemma3nForCausalLM",
        {
            "num_hidden_layers": 6,
            "intermediate_size": [96] * 6,
            "sliding_window": 32,
            "num_kv_shared_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB_SIZE - 20,
            "laurel_rank": 12,
            "altup_num_inputs": 3,
            "activation_sparsity_pattern": [0.9, 0.9, 0.0, 0.0, 0.0, 0.0],
        },
    ),
    "deepseek_v2": ("DeepseekV2Config", "DeepseekV2ForCausalLM", {**_LATENT, "q_lora_rank": None}),
    "deepseek_v3": ("DeepseekV3Config", "DeepseekV3ForCausalLM", {**_LATENT, "q_lora_rank": 40}),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", {"num_local_experts": 6, "num_experts_per_tok": 2}),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        "Qwen2MoeForCausalLM",
        {**_EXPERTS, "shared_expert_intermediate_size": 48, "mlp_only_layers": [1], "qkv_bias": True},
    ),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", {**_EXPERTS, "norm_topk_prob": True, "head_dim": 32}),
    "glm4_moe": (
        "Glm4MoeConfig",
        "Glm4MoeForCausalLM",
        {**_EXPERTS, **_SHARED, "use_qk_norm": True, "attention_bias": True, "partial_rotary_factor": 0.5},
    ),
    "minimax_m2": (
        "MiniMaxM2Config",
        "MiniMaxM2ForCausalLM",
        {**_EXPERTS, "intermediate_size": 40, "rotary_dim": 8},
    ),
    "olmoe": ("OlmoeConfig", "OlmoeForCausalLM", {**_EXPERTS, "intermediate_size": 40, "clip_qkv": 2.0}),
    "ernie4_5_moe": (
        "Ernie4_5_MoeConfig",
        "Ernie4_5_MoeForCausalLM",
        {**_EXPERTS, "moe_num_shared_experts": 2, "moe_layer_end_index": 2, "tie_word_embeddings": True},
    ),
    "dots1": (
        "Dots1Config",
        "Dots1ForCausalLM",
        {**_EXPERTS, **_SHARED, "attention_bias": True, "sliding_window": 24, "max_window_layers": 2},
    ),
    "solar_open": (
        "SolarOpenConfig",
        "SolarOpenForCausalLM",
        {**_EXPERTS, **_SHARED, "first_k_dense_replace": 0, "attention_bias": True},
    ),
    "llama4": (
        "Llama4TextConfig",
        "Llama4ForCausalLM",
        {
            "num_hidden_layers": 4,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "intermediate_size": 40,
            "intermediate_size_mlp": 96,
            "interleave_moe_layer_step": 2,
            "no_rope_layers": [1, 1, 0, 1],
            "attention_chunk_size": 32,
            "floor_scale": 16,
            "attn_scale": 0.3,
            "head_dim": 24,
        },
    ),
    "gpt_oss": (
        "GptOssConfig",
        "GptOssForCausalLM",
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "sliding_window": 24,
            "swiglu_limit": 2.0,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 64,
                "truncate": False,
            },
        },
    ),
    "deepseek_v2_moe": (
        "DeepseekV2Config",
        "DeepseekV2ForCausalLM",
        {**_LATENT, **_EXPERTS, **_SHARED, "q_lora_rank": 40, "topk_method": "group_limited_greedy"},
    ),
    "deepseek_v3_moe": (
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {**_LATENT, **_EXPERTS, **_SHARED, "q_lora_rank": None},
    ),
    "deepseek_v32": (
        "DeepseekV32Config",
        "DeepseekV32ForCausalLM",
        {
            **_LATENT,
            **_EXPERTS,
            **_SHARED,
            **_INDEXER,
            "q_lora_rank": 40,
        },
    ),
    "glm_moe_dsa": (
        "GlmMoeDsaConfig",
        "GlmMoeDsaForCausalLM",
        {
            **_LATENT,
            **_EXPERTS,
            **_SHARED,
            **_INDEXER,
            "q_lora_rank": 40,
            "indexer_types": ["full", "shared", "full", "shared"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "axk2": (
        "AXK2Config",
        "AXK2ForCausalLM",
        {
            **_LATENT,
            **_EXPERTS,
            **_SHARED,
            **_INDEXER,
            "q_lora_rank": 40,
            "gated_norm_rank": 6,
            "n_group": None,
            "topk_group": None,
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "dots3_note": (
        "Dots3NoteTextConfig",
        "Dots3NoteForCausalLM",
        {
            **_LATENT,
            **_EXPERTS,
            **_SHARED,
            **_INDEXER,
            "q_lora_rank": 40,
            "head_dim": 40,
            "num_hidden_layers": 5,
            "layer_types": [f"{kind}_attention" for kind in ("sliding", "indexed", "sliding", "full", "indexed")],
            "sliding_window": 24,
            "shared_experts_intermediate_size": 24,
            "rope_parameters": None,
            "rope_theta": 20000.0,
            **_OTHER_LATENT,
            "use_dsa": None,
            "tie_word_embeddings": False,
        },
    ),
    "hy_v4": (
        "HYV4Config",
        "HYV4ForCausalLM",
        {
            **_LATENT,
            **_EXPERTS,
            **_SHARED,
            **_INDEXER,
            "q_lora_rank": 40,
            "indexer_types": ["full", "shared", "full", "shared"],
            "hc_mult": 3,
            "swiglu_limit": 0.7,
            "tie_word_embeddings": False,
        },
    ),
    "mistral_large4": (
        "MistralLarge4Config",
        "MistralLarge4ForConditionalGeneration",
        {
            "text_config": {
                **_LATENT,
                **_EXPERTS,
                **_SHARED,
                **_INDEXER,
                "tie_word_embeddings": False,
                "final_logit_softcapping": 10.0,
                "indexer_types": ["full", "shared", "full", "shared", "full"],
                "no_rope_layers": [1, 0, 1, 0, 1],
                "kv_source_layers": [0, 1, 0, 1, 4],
                "num_hidden_layers": 5,
            },
            "vision_config": _PIXTRAL,
        },
    ),
}
SEEDS = {
    "llama": 4,
    "mistral": 3,
    "qwen2": 1,
    "qwen3": 5,
    "gemma3": 1,
    "gemma4": 1,
    "deepseek_v2": 1,
    "deepseek_v3": 1,
    "deepseek_v32": 6,
    "glm_moe_dsa": 40,
    "axk2": 3,
    "dots3_note": 11,
    "hy_v4": 20,
    "mistral_large4": 13,
    "starcoder2": 2,
    "minimax_m2": 2,
    "ernie4_5_moe": 3,
    "dots1": 5,
}  # others: 1
"""Of six tried for each family: over 1,024 greedy tokens after random prompts the best two logits are at least 9e-4 apart.
Rounding moves these logits by about 3e-5. DeepSeek V3.2, eight tried: a chosen token's score and the best one's that is not differ by
4e-5 of the scores' deviation at least. GLM-5, sixty tried: logits 3.8e-3, scores 3.9e-5, over 1,040 tokens and their prompts. Mistral
Large 4, Hy4, A.X-K2 and dots3-note, twenty tried at least: logits 5e-3 over 285 tokens."""
ROPE_VARIANTS: dict[str, dict[str, Any]] = {
    # for `rope_parameters=`; lengths fit max_position_embeddings=512
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    "llama3": {
        "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64},
}  # fmt: skip


def make_tiny_checkpoint(
    path: str | Path,
    family: str | None = None,
    *,
    config_class: type | None = None,
    model_class: type | None = None,
    seed: int | None = None,
    dtype: str = "float32",
    max_shard_size: str = "1GB",
    with_tokenizer: bool = True,
    **overrides: Any,
) -> Path:
    """Save a random model of `family` (a key of `FAMILIES`), or of transformers' or your own `config_class` and `model_class`, in folder
    `path`; `overrides` are config.json fields. Raises `ValueError` for neither or both.

    Weights are scaled so that greedy output varies and the best two logits lie well apart. `max_shard_size="100KB"`
    gives a sharded checkpoint with an index.
    """
    import torch
    import transformers

    own: dict[str, Any] = {}
    if family is not None and config_class is None and model_class is None:
        config_name, model_name, own = FAMILIES[family]
        config_class, model_class = getattr(transformers, config_name), getattr(transformers, model_name)
        seed = SEEDS.get(family, 1) if seed is None else seed
    elif family is not None or config_class is None or model_class is None:
        raise ValueError("make_tiny_checkpoint takes either a family, or config_class and model_class.")
    fields = {**_COMMON, **own, **overrides}
    if "text_config" in own:  # a model that reads images or sound as well: fields are those of its text
        fields = {**own, "text_config": {**_COMMON, **own["text_config"], **overrides}}
    config = config_class(**fields)
    with torch.random.fork_rng():
        torch.manual_seed(1 if seed is None else seed)
        model: Any = model_class(config)
        _randomize(model)
    path = Path(path)
    model.to(getattr(torch, dtype)).save_pretrained(path, max_shard_size=max_shard_size)
    if with_tokenizer:
        make_tiny_tokenizer(path)
    return path


def _randomize(model: Any) -> None:
    """Unit-variance products, strong sub-layers (so that a tied embedding does not just repeat its input), varied norms."""
    import torch

    is_gemma = "Gemma" in type(model).__name__  # norms multiply by 1 + w, embeddings by sqrt(hidden_size)
    is_transposed = any(name in type(model).__name__ for name in ("GptOss", "Llama4"))
    embed_scale = model.config.get_text_config().hidden_size ** 0.5 if is_gemma else 1.0
    gains = {
        "o_proj.weight": 3.0,
        "down_proj.weight": 3.0,
        "c_proj.weight": 4.0,
        "q_proj.weight": 2.0,
        "experts.down_proj": 3.0,
        "gate.weight": 2.0,
    }
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("softmax_scaling.bias"):  # of a factor, not of a sum
                weight.normal_(1.0, 0.2)
            elif name == "model.norm.weight":
                weight.normal_(embed_scale - 1.0 if is_gemma else 1.0, 0.2)
            elif is_gemma and name.endswith(("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")):
                weight.normal_(2.0, 0.2)
            elif weight.dim() == 1:
                is_factor = "norm" in name and not is_gemma and not name.endswith(".bias")
                weight.normal_(1.0 if is_factor else 0.0, 0.2)
            elif "embed_tokens" in name or "lm_head" in name:
                weight.normal_(0.0, 0.5 / embed_scale)
            else:
                # Stacked experts of gpt-oss and Llama 4 have their inputs in the axis before the last.
                fan_in = weight.shape[1] if weight.dim() == 3 and is_transposed else weight.shape[-1]
                gain = next((gain for suffix, gain in gains.items() if name.endswith(suffix)), 1.0)
                weight.normal_(0.0, gain / fan_in**0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.2)


def make_tiny_tokenizer(path: str | Path, *, vocab_size: int = VOCAB_SIZE) -> Path:
    """Save a byte-level BPE tokenizer (any text round-trips) with a ChatML template into folder `path`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_CORPUS] * 4, trainer)
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 512,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
    return path


ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    # family: (prefix of transformers' classes, fields that differ from _ENCODER)
    "bert": ("Bert", {}),
    "xlm_roberta": ("XLMRoberta", {"pad_token_id": 1, "max_position_embeddings": 130, "type_vocab_size": 1}),
    "modernbert": (
        "ModernBert",
        {"num_hidden_layers": 4, "local_attention": 16, "global_attn_every_n_layers": 3, "classifier_pooling": "mean"},
    ),
}
_ENCODER: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 128, "pad_token_id": PAD_ID, "bos_token_id": BOS_ID, "eos_token_id": EOS_ID,
    "cls_token_id": BOS_ID, "sep_token_id": EOS_ID,
}  # fmt: skip


def make_tiny_encoder(path: str | Path, family: str, head: str = "Model", **overrides: Any) -> Path:
    """Save a random encoder of `family` (a key of `ENCODERS`) in folder `path`. head: the end of its class's name, such as
    "ForSequenceClassification"; `overrides` are config.json fields."""
    import torch
    import transformers

    prefix, own = ENCODERS[family]
    config = getattr(transformers, f"{prefix}Config")(**{**_ENCODER, **own, **overrides})
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = getattr(transformers, f"{prefix}{head}")(config)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if weight.dim() == 1:
                    weight.normal_(1.0 if "norm" in name.lower() and name.endswith("weight") else 0.0, 0.2)
                else:
                    weight.normal_(0.0, (0.5 if "embeddings" in name else 2.0 / weight.shape[1] ** 0.5))
    path = Path(path)
    model.save_pretrained(path)
    make_tiny_tokenizer(path)
    return path


def load_pooling_reference(path: str | Path, head: str = "") -> Any:
    """transformers' own float32 model of a folder: `AutoModel<head>`, with plain attention."""
    import torch
    import transformers

    auto = getattr(transformers, f"AutoModel{head}")
    model = auto.from_pretrained(str(path), dtype=torch.float32, attn_implementation="eager")
    model.eval()
    return model


_CORPUS = """
The server takes a prompt and answers with the next token. A block holds the keys and values of sixteen tokens.
There is a small house near the river where the children play in the afternoon, and their mother reads a book.
What is the capital of France? The capital of France is Paris. Tell me a story about the dog and the other dog.
"""


def load_reference(path: str | Path) -> Any:
    """transformers' own float32 model of a folder, with plain attention."""
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(str(path))
    is_causal = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    auto: Any = transformers.AutoModelForCausalLM if is_causal else transformers.AutoModelForImageTextToText
    model = auto.from_pretrained(str(path), dtype=torch.float32, attn_implementation="eager")
    model.eval()
    return model


def reference_logits(model: Any, token_ids: Sequence[int]) -> Tensor:
    """[len(token_ids), vocab] float32 of one sequence, from one pass without a cache; `model` from `load_reference`."""
    import torch

    with torch.inference_mode():
        logits: Tensor = model(input_ids=torch.tensor([list(token_ids)]), use_cache=False).logits[0].float()
    return logits


def reference_greedy(
    model: Any, prompts: Sequence[Sequence[int]], max_tokens: int, *, eos_token_ids: Sequence[int] = ()
) -> list[list[int]]:
    """transformers' greedy continuation of each prompt alone, with its own cache. Ends early after a token in
    `eos_token_ids`, which stays in the result; by default nothing ends it."""
    import torch

    results = []
    with torch.inference_mode():
        for prompt in prompts:
            output: list[int] = []
            step = torch.tensor([list(prompt)])
            cache = None
            while len(output) < max_tokens:
                result = model(input_ids=step, past_key_values=cache, use_cache=True)
                cache = result.past_key_values
                token = int(result.logits[0, -1].argmax())
                output.append(token)
                if token in eos_token_ids:
                    break
                step = torch.tensor([[token]])
            results.append(output)
    return results
