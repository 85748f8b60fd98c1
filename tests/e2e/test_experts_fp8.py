"""Checkpoints whose experts, and maybe all else, are in e4m3: the same numbers decoded beforehand give the same ids."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from pelton_e2e import generate, greedy, make_llm, make_prompts
from pelton_stacked import apart
from safetensors.torch import load_file, save_file

from pelton.errors import ConfigError
from pelton.testing.models import VOCAB_SIZE, make_tiny_checkpoint
from pelton_plugins.models import experts
from pelton_plugins.quantization.numbers import round_rows, row_scales

E4M3 = torch.float8_e4m3fn
QUANTIZED = (
    "_proj.weight", "_with_mqa.weight", "indexer.wq_b.weight", "indexer.wk.weight",
    *(f".{name}.weight" for name in ("wq", "wkv_b", "wo", "w1", "w2", "w3", "linear_gate")),  # Mistral Large 4's, Hy4's
)  # fmt: skip
BLOCK = [24, 16]  # of which the rows divide no matrix here


def in_e4m3(weight: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Numbers, scales as a checkpoint has them, and what they stand for."""
    rows, columns = weight.shape
    block = {"block": BLOCK, "channel": [1, columns], "tensor": [rows, columns]}[kind]
    shape = -(-rows // block[0]), -(-columns // block[1])
    scales = torch.rand(shape, generator=torch.Generator().manual_seed(rows)) * 1e-3 + 1e-3
    spread = scales.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
    numbers = (weight / spread).clamp(-448, 448).to(E4M3)
    return numbers, scales.squeeze() if kind == "tensor" else scales, numbers.float() * spread


def write_both(folder: Path, family: str, kind: str, is_quantized: Any) -> tuple[Path, Path]:
    """The quantized checkpoint, and one that has what it stands for in float32."""
    plain, packed = folder / "plain", folder / "packed"
    make_tiny_checkpoint(plain, family, with_tokenizer=False)
    shutil.copytree(plain, packed)
    tensors = apart(load_file(plain / "model.safetensors"))
    small = dict(tensors)
    for name in [name for name in tensors if name.endswith(QUANTIZED) and is_quantized(name)]:
        small[name], scales, tensors[name] = in_e4m3(tensors[name].float(), kind)
        small[name + ("_scale_inv" if kind == "block" else "_scale")] = scales
    save_file(tensors, plain / "model.safetensors")
    save_file(small, packed / "model.safetensors")
    settings: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    settings |= (
        {"weight_block_size": BLOCK, "modules_to_not_convert": ["W_down", "W_up"]}  # A.X-K2's
        if kind == "block"
        else {"modules_to_not_convert": ["self_attn", "shared_experts"]}
    )
    config = json.loads((packed / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    return plain, packed


@pytest.mark.parametrize("is_kept", [False, True], ids=["decoded", "packed"])
@pytest.mark.parametrize(
    "family, kind",
    [
        ("qwen3_moe", "block"), ("deepseek_v3_moe", "block"), ("deepseek_v32", "block"), ("glm_moe_dsa", "block"), ("llama", "block"),
        ("axk2", "block"), ("dots3_note", "block"), ("hy_v4", "block"), ("mistral_large4", "block"),
        ("qwen3_moe", "channel"), ("qwen3_moe", "tensor"),
    ],
)  # fmt: skip
def test_ids_equal_those_of_the_decoded_checkpoint(
    family: str, kind: str, is_kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts that stay packed, as on a GPU, are read by torch's op here."""
    if is_kept and family == "llama":
        pytest.skip("no experts")
    forms = []
    if is_kept:
        monkeypatch.setattr(experts, "keeps_packed", lambda config: True)
        form = experts._form
        monkeypatch.setattr(experts, "_form", lambda *args: forms.append(form(*args)) or forms[-1])
    sizes = write_both(
        tmp_path, family, kind, lambda name: (kind == "block" and "weights_proj" not in name) or ".experts." in name
    )
    prompts = make_prompts(VOCAB_SIZE, (1, 17, 60))
    answers = []
    for folder in sizes:
        with make_llm(str(folder), dtype="float32") as llm:
            answers.append(generate(llm, prompts, greedy(16)))
    assert answers[0] == answers[1]
    assert ("e4m3", BLOCK[1] if kind == "block" else None) in forms or not is_kept


def test_experts_are_rounded_while_they_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a checkpoint has them whose rows are rounded beforehand."""
    monkeypatch.setattr(experts, "keeps_packed", lambda config: True)
    plain, packed = tmp_path / "plain", tmp_path / "packed"
    make_tiny_checkpoint(plain, "mixtral", with_tokenizer=False)
    shutil.copytree(plain, packed)
    tensors = load_file(plain / "model.safetensors")
    small = dict(tensors)
    for name, weight in tensors.items():
        if ".experts." in name or "_proj." in name:
            scales = row_scales(weight)
            small |= {name: round_rows(weight, scales), f"{name}_scale": scales.unsqueeze(-1)}
    save_file(small, packed / "model.safetensors")
    config = json.loads((packed / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}))
    answers = []
    for folder in (plain, packed):
        with make_llm(str(folder), dtype="float32", quantization="fp8") as llm:
            answers.append(generate(llm, make_prompts(VOCAB_SIZE, (1, 17)), greedy(16)))
    assert answers[0] == answers[1]


@pytest.mark.parametrize("kind", ["block", "channel", "tensor"])
def test_made_up_weights_are_those_of_the_checkpoint_s_form(tmp_path: Path, kind: str) -> None:
    _, packed = write_both(tmp_path, "qwen3_moe", kind, lambda name: ".experts." in name or kind == "block")
    (packed / "model.safetensors").unlink()
    with make_llm(str(packed), load_format="dummy") as llm:
        answers = generate(llm, make_prompts(VOCAB_SIZE, (1, 17)), greedy(8))
    assert len(set(answers[0])) > 1 and answers[0] != answers[1]


def test_scales_of_another_shape_are_refused(tmp_path: Path) -> None:
    _, packed = write_both(tmp_path, "qwen3_moe", "block", lambda name: True)
    tensors = load_file(packed / "model.safetensors")
    name = "model.layers.0.mlp.experts.0.down_proj.weight_scale_inv"
    save_file(tensors | {name: tensors[name][:, :1].repeat(1, 9)}, packed / "model.safetensors")
    with pytest.raises(
        ConfigError, match=r"experts\.0\.down_proj\.weight_scale_inv is \[.*, 9\]; config.json makes it"
    ):
        make_llm(str(packed))
