"""Settings of quantization in a folder, brought into one place: config.json's `quantization_config`.

Older and other writers keep them elsewhere: in `compression_config`, in a file of their own, or without the name of the method.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pelton.model.formats import read_json

FIELD, METHOD = "quantization_config", "quant_method"
MLX_FIELD = "quantization"
FILES = {"hf_quant_config.json": "modelopt", "quantize_config.json": "gptq"}
"""By name: the method whose settings it has."""


def with_quantization(config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return config.json's fields with `quantization_config` where the folder has it in another form."""
    found = _found(config, folder)
    return dict(config) if found is None else {**config, FIELD: found}


def _found(config: Mapping[str, Any], folder: Path) -> dict[str, Any] | None:
    nested = config.get("text_config") or config.get("llm_config") or {}
    stated = config.get(FIELD) or config.get("compression_config") or nested.get(FIELD) or config.get(MLX_FIELD)
    if isinstance(stated, dict) and stated:
        return {METHOD: _method(config, stated), **stated}
    for name, method in FILES.items():
        if (folder / name).is_file():
            stated = read_json(folder / name)
            is_of_weights = method != "modelopt" or (stated.get("quantization") or stated).get("quant_algo") is not None
            return {METHOD: method, **stated} if is_of_weights else None  # else of the cache alone
    return None


def _method(config: Mapping[str, Any], stated: Mapping[str, Any]) -> str:
    """Return the method of settings that do not name one."""
    if stated.get("load_in_4bit") or stated.get("load_in_8bit"):
        return "bitsandbytes"
    if config.get(MLX_FIELD) == stated:
        return "mlx"
    return "not named"
