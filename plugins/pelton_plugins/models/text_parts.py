"""The text part of checkpoints that read images or sound as well: what is not of it stays in the file.

A released checkpoint keeps the language model's fields under `text_config`, and its tensors behind a prefix.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pelton.errors import ConfigError
from pelton.model.build import BuildConfig
from pelton.model.loading import LazyWeight
from pelton_plugins.models.gemma3 import Gemma3ForCausalLM
from pelton_plugins.models.gemma3n import Gemma3nForCausalLM
from pelton_plugins.models.gemma4 import Gemma4ForCausalLM
from pelton_plugins.models.lfm2 import Lfm2ForCausalLM
from pelton_plugins.models.lfm3 import Lfm3ForCausalLM
from pelton_plugins.models.mistral import MistralForCausalLM
from pelton_plugins.models.moe import check_fields
from pelton_plugins.models.nemotron_h import NemotronHForCausalLM
from pelton_plugins.models.qwen2 import Qwen2ForCausalLM
from pelton_plugins.models.qwen3 import Qwen3ForCausalLM
from pelton_plugins.models.qwen3_moe import Qwen3MoeForCausalLM
from pelton_plugins.models.qwen3_next import Qwen3_5ForCausalLM
from pelton_plugins.models.stacked_experts import one_for_each_expert

TEXT = "language_model."


def check_text(config: BuildConfig, *known: str) -> None:
    """Refuse a text part of another kind."""
    found = config.hf.get("model_type")
    if found not in known:
        raise ConfigError(
            f"config.json's text_config has model_type {found!r}; of this architecture only {' and '.join(known)} is computed here. "
            "Use another checkpoint."
        )


def ignore_other_parts(config: BuildConfig, prefix: str) -> None:
    names = "vision_tower|vision_model|visual|audio_tower|multi_modal_projector|embed_vision|embed_audio|merger"
    config.weights.ignore(rf"{prefix}({names})\..*")


class Mistral3ForConditionalGeneration(MistralForCausalLM):
    """Mistral Small 3.1 and 3.2, Ministral 3: Mistral's text."""

    def __init__(self, *, config: BuildConfig, prefix: str = "") -> None:
        check_text(config, "mistral", "ministral3")
        super().__init__(config=config, prefix=prefix + TEXT)
        ignore_other_parts(config, rf"{prefix}(model\.)?")

    def load_weights(self, weights: Iterable[tuple[str, LazyWeight]]) -> set[str]:
        return super().load_weights(_part_first(weights))


class Gemma3ForConditionalGeneration(Gemma3ForCausalLM):
    """Gemma 3 from 4B on."""

    def __init__(self, *, config: BuildConfig, prefix: str = "") -> None:
        check_text(config, "gemma3_text")
        super().__init__(config=config, prefix=prefix + TEXT)
        ignore_other_parts(config, rf"{prefix}(model\.)?")

    def load_weights(self, weights: Iterable[tuple[str, LazyWeight]]) -> set[str]:
        return super().load_weights(_part_first(weights))


class Gemma3nForConditionalGeneration(Gemma3nForCausalLM):
    """Gemma 3n, whose parts are all behind one prefix."""

    def __init__(self, *, config: BuildConfig, prefix: str = "") -> None:
        check_text(config, "gemma3n_text")
        super().__init__(config=config, prefix=prefix)
        ignore_other_parts(config, f"{prefix}model.")

    def load_weights(self, weights: Iterable[tuple[str, LazyWeight]]) -> set[str]:
        return super().load_weights(_without_part(weights))


class Gemma4ForConditionalGeneration(Gemma4ForCausalLM):
    """Gemma 4, as Gemma 3n."""

    def __init__(self, *, config: BuildConfig, prefix: str = "") -> None:
        check_text(config, "gemma4_text")
        super().__init__(config=config, prefix=prefix)
        ignore_other_parts(config, f"{prefix}model.")

    def load_weights(self, weights: Iterable[tuple[str, LazyWeight]]) -> set[str]:
        return super().load_weights(_without_part(weights))


class Qwen2VLForConditionalGeneration(Qwen2ForCausalLM):
    """Qwen2-VL and Qwen2.5-VL, whose fields may lie at the outer level, and tensors at either."""

    def __init__(self, *, config: BuildConfig, prefix: str = "") -> None:
        check_text(config, "qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text")
        super().__init__(config=config, prefix=prefix)
        ignore_other_parts(config, rf"{prefix}(model\.)?")

    def load_weights(self, weights: Iterable[tuple[str, LazyWeight]]) -> set[str]:
        return super().load_weights(_without_part(weights))


class Qwen3VLForConditionalGeneration(Qwen3ForCausalLM):
    """Qwen3-VL, dense."""

    def __init__(self, *, config: BuildConfig, prefix: str = "") -> None:
        check_text(config, "qwen3_vl_text")
        super().__init__(config=config, prefix=prefix)
        ignore_other_parts(config, rf"{prefix}(model\.)?")

    def load_weights(self, weights: Iterable[tuple[str, LazyWeight]]) -> set[str]:
        return super().load_weights(_without_part(weights))


class Qwen3VLMoeForConditionalGeneration(Qwen3MoeForCausalLM):
    """Qwen3-VL with experts. Released ones are [E, H, 2 I] and [E, I, H]; transformers writes models that it made the other way."""

    def __init__(self, *, config: BuildConfig, prefix: str = "") -> None:
        check_text(config, "qwen3_vl_moe_text")
        check_fields(config.hf, norm_topk_prob=True)
        super().__init__(config=config, prefix=prefix)
        ignore_other_parts(config, rf"{prefix}(model\.)?")
        self.hidden_size = config.hf.hidden_size

    def load_weights(self, weights: Iterable[tuple[str, LazyWeight]]) -> set[str]:
        expected, size = self.weights.expected(), self.hidden_size
        return super().load_weights(one_for_each_expert(_without_part(weights), expected, hidden_size=size))


class Qwen3_5ForConditionalGeneration(Qwen3_5ForCausalLM):
    """Qwen3.5 as it is released, dense or with experts, and MiniCPM-V 4.6, 4.7 and MiniCPM-OCR, whose text it is."""

    def __init__(self, *, config: BuildConfig, prefix: str = "") -> None:
        check_text(config, "qwen3_5_text", "qwen3_5_moe_text")
        super().__init__(config=config, prefix=prefix)
        ignore_other_parts(config, f"{prefix}model.")

    def load_weights(self, weights: Iterable[tuple[str, LazyWeight]]) -> set[str]:
        return super().load_weights(_without_part(weights))


class Lfm2VlForConditionalGeneration(Lfm2ForCausalLM):
    """LFM2-VL."""

    def __init__(self, *, config: BuildConfig, prefix: str = "") -> None:
        check_text(config, "lfm2")
        super().__init__(config=config, prefix=prefix)
        ignore_other_parts(config, f"{prefix}model.")

    def load_weights(self, weights: Iterable[tuple[str, LazyWeight]]) -> set[str]:
        return super().load_weights(_without_part(weights))


class Lfm3VlForConditionalGeneration(Lfm3ForCausalLM):
    """LFM3-VL."""

    def __init__(self, *, config: BuildConfig, prefix: str = "") -> None:
        check_text(config, "lfm3")
        super().__init__(config=config, prefix=prefix)
        ignore_other_parts(config, f"{prefix}model.")

    def load_weights(self, weights: Iterable[tuple[str, LazyWeight]]) -> set[str]:
        return super().load_weights(_without_part(weights))


class NemotronOmni(NemotronHForCausalLM):
    """Nemotron 3 Omni, whose text is a whole checkpoint of Nemotron-H behind a prefix."""

    def __init__(self, *, config: BuildConfig, prefix: str = "") -> None:
        check_text(config, "nemotron_h")
        super().__init__(config=config, prefix=prefix + TEXT)
        ignore_other_parts(config, prefix)
        config.weights.ignore(
            rf"{prefix}(mlp1|vision_projector|vision_final_layernorm|sound_encoder|sound_projection)\..*"
        )


def _part_first(weights: Iterable[tuple[str, LazyWeight]]) -> Iterator[tuple[str, LazyWeight]]:
    """Yield tensors by the names of released checkpoints, `language_model.model...`. Some tools write `model.language_model...`."""
    for name, weight in weights:
        if name.startswith("lm_head."):
            name = TEXT + name
        elif name.startswith(f"model.{TEXT}"):
            name = f"{TEXT}model.{name.removeprefix(f'model.{TEXT}')}"
        yield name, weight


def _without_part(weights: Iterable[tuple[str, LazyWeight]]) -> Iterator[tuple[str, LazyWeight]]:
    """Tensors by the names of the text model alone."""
    for name, weight in weights:
        yield name.replace(f"model.{TEXT}", "model.", 1), weight
