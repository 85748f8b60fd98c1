"""Tensors of adapters: how they lie in a slot, and what is told of one that has no place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from pelton.config import LoRAConfig
from pelton.errors import ConfigError, InvalidAdapterError
from pelton.lora.peft import check_config, read_config
from pelton.model.build import BuildConfig
from pelton.quantization.interface import LinearShard
from pelton_platforms.device.adapter_memory import AdapterMemory
from pelton_platforms.device.adapter_rows import AdapterRows
from pelton_platforms.device.adapters import pack
from pelton_platforms.device.peft_tensors import read_tensors

SAMPLE: dict[str, Any] = {
    "peft_type": "LORA", "base_model_name_or_path": "your-base-model-name", "r": 16, "lora_alpha": 32,
    "target_modules": ["q_proj", "v_proj"], "bias": "none", "modules_to_save": None, "use_rslora": False,
    "use_dora": False,
}  # fmt: skip


def write(folder: Path, tensors: dict[str, torch.Tensor] | None = None, **fields: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(SAMPLE | fields))
    save_file(tensors or {}, folder / "adapter_model.safetensors")
    return folder


NAME = "model.layers.0.self_attn.{}_proj"


BUILD = BuildConfig(hf=None, dtype=torch.float32, device=torch.device("cpu"), max_model_len=8, ops=None, attention=None)  # type: ignore[arg-type]


def layers(max_rank: int = 4, **settings: Any) -> AdapterMemory:
    """q [6, 8] and v [3, 8] of one product, and o [8, 6]."""
    rows = AdapterRows(max_num_tokens=4, num_slots=1, device=torch.device("cpu"))
    made = AdapterMemory(LoRAConfig(enable_lora=True, max_lora_rank=max_rank, **settings), rows)
    made.add(BUILD, [LinearShard(NAME.format(one), size, 8, (0, size), (0, 8)) for one, size in (("q", 6), ("v", 3))])
    made.add(BUILD, [LinearShard(NAME.format("o"), 8, 6, (0, 8), (0, 6))])
    made.refuse("model.embed_tokens", "embeddings take none")
    return made


def pair(name: str, rows: int, cols: int, rank: int = 2) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    full = f"base_model.model.{NAME.format(name)}"
    return {
        f"{full}.lora_A.weight": torch.randn(rank, cols, generator=generator),
        f"{full}.lora_B.weight": torch.randn(rows, rank, generator=generator),
    }


def packed(tmp_path: Path, tensors: dict[str, torch.Tensor], **fields: Any) -> torch.Tensor:
    folder = write(tmp_path, {name: tensor.contiguous() for name, tensor in tensors.items()}, r=2, **fields)
    config = read_config(folder, max_rank=4, name="sql")
    return pack(read_tensors(folder, "sql"), config, layers(), "sql", torch.float32)


def test_matrices_that_the_operator_leaves_out_have_no_memory_and_no_layer():
    made, whole = layers(lora_target_modules=["q_proj"]), layers()
    assert made.size < whole.size
    assert made.target_modules == ["q_proj"]
    assert "lora_target_modules" in made.refused[NAME.format("v")]
    assert made.add(BUILD, [LinearShard(NAME.format("o"), 8, 6, (0, 8), (0, 6))]) is None  # the model calls its base op
    config = check_config(SAMPLE | {"r": 2}, "sql")
    with pytest.raises(
        InvalidAdapterError, match="takes no adapter: lora_target_modules, with which the engine was started"
    ):
        pack(pair("v", 3, 8), config, made, "sql", torch.float32)
    assert pack(pair("q", 6, 8), config, made, "sql", torch.float32).any()


def test_a_module_that_no_layer_has_is_refused():
    with pytest.raises(
        ConfigError, match=r"lora_target_modules has k_proj, which .*; there are embed_tokens, o_proj, q_proj, v"
    ):
        layers(lora_target_modules=["q_proj", "k_proj"]).allocate(BUILD)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_refused(tmp_path, number):
    tensors = pair("v", 3, 8)
    next(iter(tensors.values()))[0, 0] = number
    with pytest.raises(InvalidAdapterError, match="infinite or NaN in float32"):
        packed(tmp_path, tensors)


def test_matrices_lie_at_their_places_and_the_rest_is_zero(tmp_path):
    tensors, made = {**pair("v", 3, 8), **pair("o", 8, 6)}, layers()
    memory = packed(tmp_path, tensors)
    for name, (rows, cols) in {"q": (6, 8), "v": (3, 8), "o": (8, 6)}.items():
        (part,) = made.parts[NAME.format(name)]
        a = memory[part.a_start :][: made.rank * cols].view(made.rank, cols)
        b = memory.as_strided((made.rank, rows), part.b_strides, part.b_start)
        full = f"base_model.model.{NAME.format(name)}"
        product = b.T @ a
        if name == "q":
            assert not a.any()
            assert not b.any()
        else:
            expected = 16.0 * tensors[f"{full}.lora_B.weight"] @ tensors[f"{full}.lora_A.weight"]
            torch.testing.assert_close(product, expected)


def test_pickled_tensors_are_read_as_tensors_alone(tmp_path):
    expected = packed(tmp_path, pair("q", 6, 8))
    (tmp_path / "adapter_model.safetensors").unlink()
    torch.save(pair("q", 6, 8), tmp_path / "adapter_model.bin")
    config = read_config(tmp_path, max_rank=4)
    assert torch.equal(pack(read_tensors(tmp_path, "x"), config, layers(), "x", torch.float32), expected)
    torch.save({"x": object()}, tmp_path / "adapter_model.bin")
    with pytest.raises(InvalidAdapterError, match=r"adapter_model.bin cannot be read as tensors alone"):
        read_tensors(tmp_path, "x")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(InvalidAdapterError, match=r"adapter_model.safetensors cannot be read"):
        read_tensors(tmp_path, "x")


@pytest.mark.parametrize(
    ("tensors", "match"),
    [
        ({}, "has no tensors"),
        (pair("k", 3, 8), r"layer 'model.layers.0.self_attn.k_proj' takes no adapter: this model has no such layer; did you"),
        (pair("q", 5, 8), r"lora_B of .*q_proj' is float32 \[5, 2\]; expected floating-point \[6, 2\]"),
        (pair("q", 6, 9), r"lora_A of .*q_proj' is float32 \[2, 9\]; expected floating-point \[2, 8\]"),
        (pair("q", 6, 8, rank=3), r"\[3, 8\]; expected floating-point \[2, 8\]"),
        ({name: one.to(torch.int8) for name, one in pair("q", 6, 8).items()}, "is int8"),
        (dict(list(pair("q", 6, 8).items())[:1]), "has no lora_B"),
        ({"base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(2, 4)}, "adapts an embedding"),
        ({"base_model.model.model.embed_tokens.lora_A.weight": torch.zeros(2, 4)}, "takes no adapter: embeddings take none"),
        ({f"base_model.model.{NAME.format('q')}.lora_magnitude_vector": torch.zeros(6)}, "belongs to DoRA"),
        ({f"base_model.model.{NAME.format('q')}.bias": torch.zeros(6)}, "biases are not served"),
        ({"base_model.model.lm_head.weight": torch.zeros(6, 2)}, "neither lora_A nor lora_B"),
    ],
)  # fmt: skip
def test_no_tensor_is_left_out_in_silence(tmp_path, tensors, match):
    with pytest.raises(InvalidAdapterError, match=match):
        packed(tmp_path, tensors)
