"""The models that come with Pelton, by the architecture names of config.json."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pelton.entries import POOL, ModelEntry, SettingsEntry
from pelton.hookspecs import hookimpl

PELTON_API = ">=1,<2"


@hookimpl
def pelton_settings() -> Sequence[SettingsEntry]:
    return [
        SettingsEntry(name="models", load="pelton_plugins.models.settings:ModelSettings", doc="counters of experts")
    ]


@hookimpl
def pelton_models() -> Sequence[ModelEntry]:
    return [
        _entry("llama", "LlamaForCausalLM", "Llama, SmolLM2 and others of their shape"),
        ModelEntry(
            name="mistral",
            load="pelton_plugins.models.mistral:MistralForCausalLM",
            architectures=("MistralForCausalLM", "Ministral3ForCausalLM"),
            doc="Mistral and Ministral 3: Llama's shape with a sliding window, or with queries scaled by position",
        ),
        _entry("qwen2", "Qwen2ForCausalLM", "Llama's shape with QKV biases"),
        _entry("qwen3", "Qwen3ForCausalLM", "Llama's shape with query and key norms"),
        ModelEntry(
            name="deepseek",
            load="pelton_plugins.models.deepseek:DeepseekForCausalLM",
            architectures=("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"),
            doc="DeepSeek V2 and V3: attention over latents (MLA), dense MLPs and experts",
        ),
        ModelEntry(
            name="glm4_moe_lite",
            load="pelton_plugins.models.deepseek:DeepseekForCausalLM",
            architectures=("Glm4MoeLiteForCausalLM",),
            config_defaults=(("topk_method", "noaux_tc"), ("first_k_dense_replace", 1), ("rms_norm_eps", 1e-5)),
            doc="GLM-4.7-Flash: DeepSeek V3's shape",
        ),
        ModelEntry(
            name="deepseek_v32",
            load="pelton_plugins.models.deepseek:DeepseekV32ForCausalLM",
            architectures=("DeepseekV32ForCausalLM",),
            doc="DeepSeek V3.2: V3 with attention to the tokens that an indexer chooses",
        ),
        ModelEntry(
            name="glm_moe_dsa",
            load="pelton_plugins.models.deepseek:DeepseekV32ForCausalLM",
            architectures=("GlmMoeDsaForCausalLM",),
            config_defaults=(
                ("topk_method", "noaux_tc"),
                ("first_k_dense_replace", 3),
                ("n_shared_experts", 1),
                ("routed_scaling_factor", 2.5),
                ("rms_norm_eps", 1e-5),
                ("indexer_rope_interleave", True),
            ),
            doc="GLM-5: DeepSeek V3.2's shape, with an indexer in all or some layers",
        ),
        ModelEntry(
            name="dots3_note",
            load="pelton_plugins.models.dots3_note:Dots3NoteForCausalLM",
            architectures=("Dots3NoteForCausalLM",),
            config_defaults=(("rms_norm_eps", 1e-5), ("indexer_rope_interleave", True)),
            doc="dots3-note, text: layers with DeepSeek V3.2's indexer or with windows, gates of heads",
        ),
        ModelEntry(
            name="axk2",
            load="pelton_plugins.models.axk2:AXK2ForCausalLM",
            architectures=("AXK2ForCausalLM",),
            config_defaults=(("first_k_dense_replace", 1), ("n_shared_experts", 1), ("routed_scaling_factor", 2.5)),
            doc="A.X-K2: DeepSeek V3.2's shape with gates of norms and of what attention gives",
        ),
        *(
            ModelEntry(
                name=name,
                load=f"pelton_plugins.models.hy_v4:{architecture}",
                architectures=(architecture,),
                config_defaults=(
                    ("first_k_dense_replace", 1),
                    ("n_shared_experts", 1),
                    ("routed_scaling_factor", 2.827),
                    ("rms_norm_eps", 1e-5),
                    ("index_topk_freq", 4),
                    ("hc_mult", 4),
                    ("rope_interleave", is_interleaved),
                    ("indexer_rope_interleave", is_interleaved),
                ),
                doc=f"{known_as}: DeepSeek V3.2's shape with streams, sinks, gates, and an indexer in all or some layers",
            )
            for name, architecture, is_interleaved, known_as in (
                ("hy_v4", "HYV4ForCausalLM", False, "Hy4"),
                (
                    "hy_v4_vl-text",
                    "HYV4VLForConditionalGeneration",
                    True,
                    "Hy4 with a part for images, of which the text is read",
                ),
            )
        ),
        ModelEntry(
            name="mistral_large4",
            load="pelton_plugins.models.mistral_large4:MistralLarge4ForConditionalGeneration",
            architectures=("MistralLarge4ForConditionalGeneration",),
            config_defaults=(
                ("first_k_dense_replace", 1),
                ("n_shared_experts", 1),
                ("rms_norm_eps", 1e-5),
                ("final_logit_softcapping", 30.0),
            ),
            doc="Mistral Large 4, text: an indexer in all or some layers, queries scaled by position, latents that layers share",
        ),
        _entry("mixtral", "MixtralForCausalLM", "Mistral's shape with experts"),
        _entry("qwen2_moe", "Qwen2MoeForCausalLM", "Qwen2's attention with experts, one of them taken by every token"),
        _entry("qwen3_moe", "Qwen3MoeForCausalLM", "Qwen3's attention with experts"),
        _entry("glm4_moe", "Glm4MoeForCausalLM", "GLM-4.5: dense layers, then experts chosen by groups"),
        ModelEntry(
            name="minimax_m2",
            load="pelton_plugins.models.minimax_m2:MiniMaxM2ForCausalLM",
            architectures=("MiniMaxM2ForCausalLM",),
            config_defaults=(("rope_theta", 5e6),),
            doc="MiniMax-M2: norms of all heads' queries and keys, experts by sigmoid scores and a correction",
        ),
        ModelEntry(
            name="olmoe",
            load="pelton_plugins.models.olmoe:OlmoeForCausalLM",
            architectures=("OlmoeForCausalLM",),
            config_defaults=(("rms_norm_eps", 1e-5),),
            doc="OLMoE: norms of all heads' queries and keys, experts",
        ),
        ModelEntry(
            name="ernie4_5_moe",
            load="pelton_plugins.models.ernie4_5_moe:Ernie4_5_MoeForCausalLM",
            architectures=("Ernie4_5_MoeForCausalLM",),
            config_defaults=(("rms_norm_eps", 1e-5), ("rope_theta", 5e5), ("tie_word_embeddings", True)),
            doc="ERNIE 4.5 with experts: neighbours of a head turn, shared experts",
        ),
        ModelEntry(
            name="dots1",
            load="pelton_plugins.models.dots1:Dots1ForCausalLM",
            architectures=("Dots1ForCausalLM",),
            config_defaults=(("norm_topk_prob", False), ("sliding_window", 4096)),
            doc="dots.llm1: Qwen3's attention, dense layers, then experts with shared ones",
        ),
        ModelEntry(
            name="solar_open",
            load="pelton_plugins.models.solar_open:SolarOpenForCausalLM",
            architectures=("SolarOpenForCausalLM",),
            config_defaults=(("rms_norm_eps", 1e-5), ("rope_theta", 1e6), ("n_shared_experts", 1)),
            doc="Solar Open: Llama's attention, experts with shared ones",
        ),
        _entry("llama4", "Llama4ForCausalLM", "Llama 4, text: attention in chunks, layers without rope, experts"),
        ModelEntry(
            name="llama4-text",
            load="pelton_plugins.models.llama4:Llama4ForConditionalGeneration",
            architectures=("Llama4ForConditionalGeneration",),
            doc="Llama 4 with its part for images, of which the text is read",
        ),
        *(_text_part(*one) for one in _TEXT_PARTS),
        _entry("mamba2", "Mamba2ForCausalLM", "Mamba-2: layers with a state, and no attention"),
        _entry("bamba", "BambaForCausalLM", "Bamba: layers with a state (Mamba-2), and some with attention"),
        *_QWEN_HYBRIDS,
        *(
            ModelEntry(
                name=name,
                load=f"pelton_plugins.models.mamba:{architecture}",
                architectures=(architecture,),
                config_defaults=(("tie_word_embeddings", True),),
                doc=f"{known_as}: layers with a state, and no attention",
            )
            for name, architecture, known_as in (
                ("mamba", "MambaForCausalLM", "Mamba"),
                ("falcon_mamba", "FalconMambaForCausalLM", "Falcon-Mamba"),
            )
        ),
        _entry("olmo_hybrid", "OlmoHybridForCausalLM", "OLMo Hybrid: gated delta rule, some layers as OLMo 2's"),
        _entry("kimi_linear", "KimiLinearForCausalLM", "Kimi Linear: delta rule by key, latent attention, experts"),
        ModelEntry(
            name="bailing_hybrid",
            load="pelton_plugins.models.bailing_hybrid:BailingHybridForCausalLM",
            architectures=("BailingHybridForCausalLM",),
            config_defaults=(("rope_theta", 6e6), ("n_group", 8), ("topk_group", 4), ("routed_scaling_factor", 2.5)),
            doc="Ling 3: delta rule by key with bounded decays, latent attention with gates, experts",
        ),
        ModelEntry(
            name="recurrent_gemma",
            load="pelton_plugins.models.recurrent_gemma:RecurrentGemmaForCausalLM",
            architectures=("RecurrentGemmaForCausalLM",),
            config_defaults=(("attention_window_size", 2048), ("partial_rotary_factor", 0.5)),
            doc="RecurrentGemma: real-gated linear recurrent units, some layers with attention in a window",
        ),
        ModelEntry(
            name="lara_mini",
            load="pelton_plugins.models.lara_mini:LaraMiniForCausalLM",
            architectures=("LaraMiniForCausalLM",),
            config_defaults=(("head_dim", 128), ("sliding_window", 512)),
            doc="Lara Mini: gated delta rule, attention in a window and to all tokens, experts",
        ),
        ModelEntry(
            name="zamba2",
            load="pelton_plugins.models.zamba2:Zamba2ForCausalLM",
            architectures=("Zamba2ForCausalLM",),
            config_defaults=(("rms_norm_eps", 1e-5),),
            doc="Zamba2: layers with a state (Mamba-2), before some of which a shared block of attention and MLP is computed",
        ),
        ModelEntry(
            name="minimax",
            load="pelton_plugins.models.minimax:MiniMaxForCausalLM",
            architectures=("MiniMaxForCausalLM",),
            config_defaults=(("rope_theta", 1e6), ("rms_norm_eps", 1e-5)),
            doc="MiniMax-Text-01: lightning attention, some layers with attention, experts",
        ),
        _entry("jamba", "JambaForCausalLM", "Jamba: Mamba's layers, some with attention, experts"),
        *(
            ModelEntry(
                name=name,
                load=f"pelton_plugins.models.lfm2:{architecture}",
                architectures=(architecture,),
                config_defaults=(("rope_theta", 1e6),),
                doc=doc,
            )
            for name, architecture, doc in (
                ("lfm2", "Lfm2ForCausalLM", "LFM2: short convolutions, some layers with attention"),
                ("lfm2_moe", "Lfm2MoeForCausalLM", "LFM2 with experts"),
            )
        ),
        ModelEntry(
            name="lfm2_vl-text",
            load="pelton_plugins.models.text_parts:Lfm2VlForConditionalGeneration",
            architectures=("Lfm2VlForConditionalGeneration",),
            config_defaults=(("rope_theta", 1e6),),
            doc="LFM2-VL: a checkpoint that reads images too, of which the text is read",
        ),
        *_LFM3,
        ModelEntry(
            name="granitemoehybrid",
            load="pelton_plugins.models.granite_hybrid:GraniteMoeHybridForCausalLM",
            architectures=("GraniteMoeHybridForCausalLM",),
            doc="Granite 4: layers with a state (Mamba-2), some with attention, experts or an MLP",
        ),
        _entry(
            "nemotron_h",
            "NemotronHForCausalLM",
            "Nemotron-H, Nemotron 3: Mamba-2, attention, MLPs, experts by a pattern",
        ),
        ModelEntry(
            name="nemotron_omni-text",
            load="pelton_plugins.models.text_parts:NemotronOmni",
            architectures=tuple(f"NemotronH_{size}Omni_Reasoning_V3" for size in ("", "Nano_", "Super_")),
            doc="Nemotron 3 Omni: a checkpoint that reads images and sound too, of which the text is read",
        ),
        _entry("falcon_h1", "FalconH1ForCausalLM", "Falcon-H1: Mamba-2 and attention side by side in each layer"),
        ModelEntry(
            name="gpt_oss",
            load="pelton_plugins.models.gpt_oss:GptOssForCausalLM",
            architectures=("GptOssForCausalLM",),
            doc="gpt-oss: attention with sinks, experts with biases",
        ),
        ModelEntry(
            name="smollm3",
            load="pelton_plugins.models.smollm3:SmolLM3ForCausalLM",
            architectures=("SmolLM3ForCausalLM",),
            config_defaults=(("tie_word_embeddings", True), ("rope_theta", 2e6)),
            doc="SmolLM3: Llama's shape, some layers without rope",
        ),
        _entry("seed_oss", "SeedOssForCausalLM", "Seed-OSS: Llama's shape with biases in attention"),
        _entry("granite", "GraniteForCausalLM", "Granite: Llama's shape with multipliers"),
        _entry("phi3", "Phi3ForCausalLM", "Phi-3 and Phi-4: merged tensors, a part of each head turns"),
        ModelEntry(
            name="ernie4_5",
            load="pelton_plugins.models.ernie4_5:Ernie4_5ForCausalLM",
            architectures=("Ernie4_5ForCausalLM",),
            config_defaults=(("rms_norm_eps", 1e-5), ("rope_theta", 5e5), ("tie_word_embeddings", True)),
            doc="ERNIE 4.5, dense: neighbours of a head turn",
        ),
        _entry("glm4", "Glm4ForCausalLM", "GLM-4, dense: norms around each sub-layer, half of a head turns"),
        _entry("olmo2", "Olmo2ForCausalLM", "OLMo 2: norms behind each sub-layer, and of all heads' queries and keys"),
        _entry("cohere2", "Cohere2ForCausalLM", "Command R7B and A: layer norms, attention and MLP side by side"),
        _entry("starcoder2", "Starcoder2ForCausalLM", "StarCoder2: layer norms, MLPs without a gate"),
        _entry("gemma2", "Gemma2ForCausalLM", "Gemma 2: local and global layers in turn, soft caps"),
        _entry(
            "gemma3n", "Gemma3nForCausalLM", "Gemma 3n, text: several streams, inputs for each layer, shared caches"
        ),
        _entry("gemma3", "Gemma3ForCausalLM", "Gemma 3, text: local and global layers, norms around each sub-layer"),
        _entry("gemma4", "Gemma4ForCausalLM", "Gemma 4, text, dense: the last layers read the cache of earlier ones"),
        *_encoders("bert", "BERT, MiniLM", "Bert"),
        *_encoders("roberta", "RoBERTa, XLM-RoBERTa", "Roberta", "XLMRoberta", "Camembert", reserved_positions=2),
        *_encoders("modernbert", "ModernBERT", "ModernBert"),
        ModelEntry(
            name="gemma3-model",
            load="pelton_plugins.models.gemma3_encoder:Gemma3TextModel",
            architectures=("Gemma3TextModel",),
            kind=POOL,
            attends_both_ways=True,
            doc="EmbeddingGemma: vectors",
        ),
    ]


_GEMMA3 = (
    ("vocab_size", 262_208), ("num_attention_heads", 8), ("num_key_value_heads", 4), ("head_dim", 256),
    ("max_position_embeddings", 131_072), ("rms_norm_eps", 1e-6), ("query_pre_attn_scalar", 256), ("tie_word_embeddings", True),
)  # fmt: skip
"""Fields that released checkpoints of Gemma 3 leave out."""
_TEXT_PARTS = (
    ("mistral3", "Mistral3", "Mistral Small 3.1 and 3.2, Ministral 3, Devstral Small 2", ()),
    ("gemma3", "Gemma3", "Gemma 3 from 4B on", _GEMMA3),
    ("gemma3n", "Gemma3n", "Gemma 3n as it is released", ()),
    ("gemma4", "Gemma4", "Gemma 4, dense, as it is released", ()),
    ("qwen2_vl", "Qwen2VL", "Qwen2-VL and Qwen2.5-VL", ()),
    ("qwen3_vl", "Qwen3VL", "Qwen3-VL, dense", ()),
    ("qwen3_vl_moe", "Qwen3VLMoe", "Qwen3-VL with experts", (("norm_topk_prob", True), ("rope_theta", 5e5))),
)


def _text_part(name: str, family: str, known_as: str, defaults: tuple[tuple[str, Any], ...]) -> ModelEntry:
    architecture = f"{family}ForConditionalGeneration"
    others = ("Qwen2_5_VLForConditionalGeneration",) if family == "Qwen2VL" else ()
    return ModelEntry(
        name=f"{name}-text", load=f"pelton_plugins.models.text_parts:{architecture}", architectures=(architecture, *others),
        config_defaults=defaults, doc=f"{known_as}: a checkpoint that reads images or sound too, of which the text is read",
    )  # fmt: skip


_QWEN_HYBRIDS = [
    ModelEntry(
        name=name, load=f"pelton_plugins.models.{load}", architectures=architectures,
        config_defaults=(("partial_rotary_factor", 0.25), ("head_dim", 256)), doc=doc,
    )
    for name, load, architectures, doc in (
        ("qwen3_next", "qwen3_next:Qwen3NextForCausalLM", ("Qwen3NextForCausalLM",),
         "Qwen3-Next: gated delta rule, gated attention, experts"),
        ("qwen3_5", "qwen3_next:Qwen3_5ForCausalLM", ("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"),
         "Qwen3.5, text, dense or with experts: Qwen3-Next's layers"),
        ("qwen3_5-text", "text_parts:Qwen3_5ForConditionalGeneration",
         ("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"),
         "Qwen3.5 as it is released, with a part for images, of which the text is read"),
        ("minicpmv-text", "text_parts:Qwen3_5ForConditionalGeneration",
         ("MiniCPMV4_6ForConditionalGeneration", "MiniCPMV4_7ForConditionalGeneration", "MiniCPMOcrForConditionalGeneration"),
         "MiniCPM-V 4.6 and 4.7, MiniCPM-OCR: checkpoints that read images too, of which the text is read, Qwen3.5's"),
    )
]  # fmt: skip
_LFM3_DEFAULTS = (
    ("head_dim", 128), ("sliding_window", 256), ("rope_parameters", {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
    }),
)  # fmt: skip
_LFM3 = [
    ModelEntry(
        name=name, load=f"pelton_plugins.models.{load}", architectures=(load.partition(":")[2],), config_defaults=_LFM3_DEFAULTS, doc=doc,
    )
    for name, load, doc in (
        ("lfm3", "lfm3:Lfm3ForCausalLM", "LFM3: short convolutions, some layers with attention, norms around each sub-layer"),
        ("lfm3_vl-text", "text_parts:Lfm3VlForConditionalGeneration",
         "LFM3-VL: a checkpoint that reads images too, of which the text is read"),
    )
]  # fmt: skip
_HEADS = {
    "Model": "vectors",
    "ForMaskedLM": "vectors, of a checkpoint with its pre-training head",
    "ForSequenceClassification": "a class or a score for each text, or each pair",
    "ForTokenClassification": "a class for each token",
}


def _encoders(module: str, known_as: str, *families: str, reserved_positions: int = 0) -> list[ModelEntry]:
    """One for each head; the first family's name is that of the classes."""
    return [
        ModelEntry(
            name=f"{module}-{head.removeprefix('For').lower()}",
            load=f"pelton_plugins.models.{module}:{families[0]}{head}",
            architectures=tuple(f"{family}{head}" for family in families),
            kind=POOL,
            attends_both_ways=True,
            reserved_positions=reserved_positions,
            doc=f"{known_as}: {doc}",
        )
        for head, doc in _HEADS.items()
    ]


def _entry(name: str, architecture: str, doc: str) -> ModelEntry:
    return ModelEntry(
        name=name, load=f"pelton_plugins.models.{name}:{architecture}", architectures=(architecture,), doc=doc
    )
