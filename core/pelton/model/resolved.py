"""A resolved model: everything the engine must know before weights are read. No torch."""

from __future__ import annotations

from typing import Any

import msgspec

from pelton.model.pooling import PoolingSpec


class ResolvedModel(msgspec.Struct, frozen=True, kw_only=True):
    """Made once by the front end (`model.resolve.resolve_model`) and sent to every other process."""

    name: str
    """As the user named it."""
    path: str
    """Local folder with config.json, or a `.gguf` file."""
    weights_format: str
    """safetensors, gguf or dummy: the loader's name."""
    hf_config: dict[str, Any]
    """config.json's text part (from GGUF metadata where needed), overrides applied."""
    architecture: str
    """Such as "LlamaForCausalLM"; picks the model entry."""
    dtype: str
    """float32, bfloat16 or float16: never auto."""
    max_model_len: int
    vocab_size: int
    eos_token_ids: list[int]
    generation_config: dict[str, Any]
    """Sampling defaults of the model (temperature, top_k, top_p, ...); empty when not wanted."""
    tokenizer_path: str | None
    """Folder or `.gguf` file; None with skip_tokenizer_init."""
    pooling: PoolingSpec | None = None
    """Set for a model that is run to pool instead of generating."""
    raw_config: dict[str, Any] = {}
    """config.json as it is, overrides applied: with the parts (vision, audio) that `hf_config` leaves out."""
    made_of: str = ""
    """Modules that run, for people: those of a plugin's own model, or of a library."""
    notes: list[str] = []
    """What was found odd or adjusted, for the log."""

    @property
    def is_pooling(self) -> bool:
        return self.pooling is not None
