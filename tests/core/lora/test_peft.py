"""Folders of PEFT: what is wrong with one is told by the field, the value and what would be right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from pelton.errors import AdapterNotFoundError, AdapterRankError, InvalidAdapterError
from pelton.lora.peft import check_targets, read_config

SAMPLE: dict[str, Any] = {
    "peft_type": "LORA", "base_model_name_or_path": "your-base-model-name", "r": 16, "lora_alpha": 32,
    "target_modules": ["q_proj", "v_proj"], "bias": "none", "modules_to_save": None, "use_rslora": False,
    "use_dora": False,
}  # fmt: skip
"""adapter_config.json as vLLM's page on resolver plugins has it."""


def write(folder: Path, tensors: dict[str, torch.Tensor] | None = None, **fields: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(SAMPLE | fields))
    save_file(tensors or {}, folder / "adapter_model.safetensors")
    return folder


def test_the_sample(tmp_path):
    config = read_config(write(tmp_path), max_rank=16)
    assert (config.rank, config.scale_of("model.layers.0.self_attn.q_proj")) == (16, 2.0)
    assert config.base_model == "your-base-model-name"
    check_targets(config, ["k_proj", "q_proj", "v_proj"], "x")


def test_scale_follows_rslora_and_patterns(tmp_path):
    fields = {"rank_pattern": {"q_proj": 4}, "alpha_pattern": {r"layers\.1\..*v_proj": 8}}
    config = read_config(write(tmp_path, use_rslora=True, **fields), max_rank=16)
    assert config.scale_of("model.layers.0.self_attn.q_proj") == 16.0  # 32 / sqrt(4)
    assert config.scale_of("model.layers.1.self_attn.v_proj") == 2.0  # 8 / sqrt(16)
    assert config.scale_of("model.layers.0.self_attn.v_proj") == 8.0


@pytest.mark.parametrize(
    ("fields", "error", "match"),
    [
        ({"r": 32}, AdapterRankError, r"rank exceeds maximum: .*r 32, and max_lora_rank is 16"),
        ({"rank_pattern": {"q_proj": 64}}, AdapterRankError, "r 64"),
        ({"peft_type": "IA3"}, InvalidAdapterError, "peft_type is 'IA3'; only 'LORA'"),
        ({"r": 0}, InvalidAdapterError, "r is 0; it must be a positive integer"),
        ({"r": True}, InvalidAdapterError, "r is True"),
        ({"lora_alpha": "a"}, InvalidAdapterError, "lora_alpha is 'a'"),
        ({"bias": "all"}, InvalidAdapterError, "bias is 'all': biases are not served"),
        ({"lora_bias": True}, InvalidAdapterError, "lora_bias is set"),
        ({"modules_to_save": ["lm_head"]}, InvalidAdapterError, "modules_to_save is lm_head: whole modules"),
        ({"use_dora": True}, InvalidAdapterError, r"use_dora is set \(DoRA scales"),
        ({"init_lora_weights": "pissa"}, InvalidAdapterError, "init_lora_weights is 'pissa', which changes the base"),
        ({"target_modules": []}, InvalidAdapterError, r"target_modules is \[\]; it must be a list"),
        ({"rank_pattern": {"q_proj": "x"}}, InvalidAdapterError, "rank_pattern is .*map from names to numbers"),
        ({"alpha_pattern": {"(a+)+$": 1}}, InvalidAdapterError, r"alpha_pattern has '\(a\+\)\+\$'.*repeats too much"),
        ({"alpha_pattern": {"(": 1}}, InvalidAdapterError, "alpha_pattern has '\\('"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, fields, error, match):
    with pytest.raises(error, match=match):
        read_config(write(tmp_path, **fields), max_rank=16, name="sql")


def test_a_folder_needs_its_files(tmp_path):
    with pytest.raises(AdapterNotFoundError, match="'sql' not found: its folder needs adapter_config"):
        read_config(tmp_path, max_rank=16, name="sql")
    (tmp_path / "adapter_model.safetensors").touch()
    (tmp_path / "adapter_config.json").write_text("{")
    with pytest.raises(InvalidAdapterError, match="cannot be read as JSON"):
        read_config(tmp_path, max_rank=16)


def test_a_target_that_the_model_lacks(tmp_path):
    config = read_config(write(tmp_path, target_modules=["q_proj", "c_attn"]), max_rank=16)
    with pytest.raises(InvalidAdapterError, match=r"target_modules has 'c_attn'.*there are q_proj, v_proj"):
        check_targets(config, ["q_proj", "v_proj"], "sql")
