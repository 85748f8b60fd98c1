"""Settings of the model, its tokenizer and how its weights are loaded."""

from __future__ import annotations

from typing import Any

import msgspec

from pelton.errors import ConfigError

DTYPES = ("auto", "float32", "bfloat16", "float16")
OTHER_DTYPES = {"float": "float32", "half": "float16"}


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which model, and how it is read."""

    model: str = "smollm2"
    """Name that a model source knows (`smollm2`), local folder, `.gguf` file, or hub id."""
    tokenizer: str | None = None
    """Folder, `.gguf` file or hub id of another tokenizer; the model's own when unset."""
    skip_tokenizer_init: bool = False
    """Load no tokenizer: prompts are token ids, outputs have no text."""
    trust_remote_code: bool = False
    """Accepted for compatibility; Pelton never runs code from a model folder, so True is an error."""
    dtype: str = "auto"
    """auto (the checkpoint's own, float32 weights stay float32), float32 (float), bfloat16 or float16 (half)."""
    max_model_len: int | None = None
    """Longest prompt plus output, in tokens; the model's own context length when unset."""
    seed: int = 0
    """Seeds what requests without a seed of their own draw."""
    revision: str | None = None
    """Branch, tag or commit of a hub id; its default branch when unset."""
    served_model_name: list[str] = msgspec.field(default_factory=list)
    """Names that clients may use; the first one is shown. The `model` setting when empty."""
    hf_overrides: dict[str, Any] = msgspec.field(default_factory=dict)
    """Fields of the model's config.json to replace."""
    generation_config: str = "auto"
    """auto: sampling defaults from the model's generation_config.json; pelton (or vllm): ours; else a folder."""
    override_generation_config: dict[str, Any] = msgspec.field(default_factory=dict)
    """Sampling defaults to set or replace, such as {"temperature": 0.5}."""
    max_logprobs: int = 20
    """Most logprobs a request may ask for; -1 for no bound."""
    chat_template: str | None = None
    """File with a Jinja chat template, or the template itself; the tokenizer's own when unset."""
    model_impl: str = "auto"
    """Whose modules a model runs on: pelton (or vllm), transformers, or auto: Pelton's own where it has the model, else transformers'."""
    enable_prompt_embeds: bool = False
    """Take prompts as embeddings too: `{"prompt_embeds": tensor}`, and `prompt_embeds` of completions."""
    quantization: str | None = None
    """How weights are kept: gguf (a .gguf file's own blocks), q8_0, q4_1, q4_0, fp8 (quantized while they load), or another
    method that a plugin offers; from the checkpoint when unset."""

    def __post_init__(self) -> None:
        if not self.model:
            raise ConfigError("model is empty; name a folder, a .gguf file, a hub id, or smollm2.")
        if self.trust_remote_code:
            raise ConfigError(
                "trust_remote_code is True; Pelton runs no code from model folders. Write a model plugin (docs/plugins.md)."
            )
        msgspec.structs.force_setattr(self, "dtype", OTHER_DTYPES.get(self.dtype, self.dtype))
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype is {self.dtype!r}; use one of {', '.join(DTYPES)}.")
        if not self.model_impl:
            raise ConfigError("model_impl is empty; use auto, pelton or transformers.")
        if self.max_model_len is not None and self.max_model_len < 1:
            raise ConfigError(f"max_model_len is {self.max_model_len}; use at least 1, or leave it unset.")
        if self.max_logprobs < -1:
            raise ConfigError(f"max_logprobs is {self.max_logprobs}; use -1 (no bound) or more.")


class LoadConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How weights get from disk into the model."""

    load_format: str = "auto"
    """auto, safetensors, gguf, sharded_state (a file a rank), streamed (one file, or HTTP), dummy (random weights), or a plugin's name."""
    model_loader_extra_config: dict[str, Any] = msgspec.field(default_factory=dict)
    """Settings of the loader, such as {"uri": "http://host/model.safetensors"} of streamed."""
    download_dir: str | None = None
    """Where downloaded weights are kept; huggingface_hub's cache when unset."""
