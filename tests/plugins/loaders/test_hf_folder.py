"""Where a folder says how it is quantized: all of it ends in config.json's `quantization_config`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pelton_plugins.loaders.hf_folder.format import HFFolderFormat

GPTQ = {"quant_method": "gptq", "bits": 4}
MLX = {"group_size": 64, "bits": 4}


@pytest.mark.parametrize(
    "config, files, wanted",
    [
        ({"hidden_size": 4}, {}, None),
        ({"quantization_config": GPTQ}, {"quantize_config.json": {"bits": 8}}, GPTQ),
        ({"compression_config": {"quant_method": "compressed-tensors"}}, {}, {"quant_method": "compressed-tensors"}),
        ({"text_config": {"quantization_config": GPTQ}}, {}, GPTQ),
        ({"llm_config": {"quantization_config": GPTQ}}, {}, GPTQ),
        ({"quantization_config": {"load_in_4bit": True}}, {}, {"quant_method": "bitsandbytes", "load_in_4bit": True}),
        ({"quantization": MLX, "quantization_config": MLX}, {}, {"quant_method": "mlx", **MLX}),
        ({"quantization": MLX}, {}, {"quant_method": "mlx", **MLX}),
        ({"quantization_config": MLX}, {}, {"quant_method": "not named", **MLX}),
        ({}, {"quantize_config.json": {"bits": 4}}, GPTQ),
        (
            {},
            {"hf_quant_config.json": {"quantization": {"quant_algo": "FP8"}}},
            {"quant_method": "modelopt", "quantization": {"quant_algo": "FP8"}},
        ),
        ({}, {"hf_quant_config.json": {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}}, None),
    ],
)
def test_where_quantization_is_stated(
    config: dict[str, Any], files: dict[str, Any], wanted: dict[str, Any] | None, tmp_path: Path
) -> None:
    for name, content in {"config.json": config, **files}.items():
        (tmp_path / name).write_text(json.dumps(content))
    found = HFFolderFormat().read_config(tmp_path)
    assert found.get("quantization_config") == wanted
    assert {name: found[name] for name in config if name != "quantization_config"} == {
        name: value for name, value in config.items() if name != "quantization_config"
    }
