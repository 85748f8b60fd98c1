"""The models that come with Pelton, by the architecture names of config.json."""

from __future__ import annotations

from collections.abc import Sequence

from pelton.entries import ModelEntry
from pelton.hookspecs import hookimpl

PELTON_API = ">=1,<2"


@hookimpl
def pelton_models() -> Sequence[ModelEntry]:
    return [
        _entry("llama", "LlamaForCausalLM", "Llama, SmolLM2 and others of their shape"),
        _entry("mistral", "MistralForCausalLM", "Llama's shape with a sliding window"),
        _entry("qwen2", "Qwen2ForCausalLM", "Llama's shape with QKV biases"),
        _entry("qwen3", "Qwen3ForCausalLM", "Llama's shape with query and key norms"),
        ModelEntry(
            name="deepseek",
            load="pelton_plugins.models.deepseek:DeepseekForCausalLM",
            architectures=("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"),
            doc="DeepSeek V2 and V3 with dense MLPs: attention over latents (MLA)",
        ),
        _entry("gemma3", "Gemma3ForCausalLM", "Gemma 3, text: local and global layers, norms around each sub-layer"),
        _entry("gemma4", "Gemma4ForCausalLM", "Gemma 4, text, dense: the last layers read the cache of earlier ones"),
    ]


def _entry(name: str, architecture: str, doc: str) -> ModelEntry:
    return ModelEntry(
        name=name, load=f"pelton_plugins.models.{name}:{architecture}", architectures=(architecture,), doc=doc
    )
