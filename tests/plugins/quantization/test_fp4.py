"""Checkpoints in four-bit floating point: the same numbers decoded beforehand give the same ids."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from pelton_e2e import generate, greedy, make_llm, make_prompts
from safetensors.torch import load_file, save_file

from pelton.errors import ConfigError
from pelton.testing.models import VOCAB_SIZE, make_tiny_checkpoint

VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
E4M3 = torch.float8_e4m3fn
KEPT = "layers.1.self_attn"
PACKED = {
    "targets": ["Linear"],
    "weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
}
FORMS: dict[str, dict[str, Any]] = {
    "modelopt": {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", f"model.{KEPT}*"]},
    "nvfp4": {
        "quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "config_groups": {"group_0": PACKED},
        "ignore": ["lm_head", f"re:.*{KEPT}.*"],
    },
    "mxfp4": {
        "quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized", "config_groups": {"group_0": PACKED},
        "ignore": ["lm_head", f"re:.*{KEPT}.*"],
    },
}  # fmt: skip


def in_four_bits(weight: torch.Tensor, form: str) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Tensors behind the matrix's name as the form's writers have them, and what they stand for."""
    rows, columns = weight.shape
    draw = torch.Generator().manual_seed(rows)
    block = 32 if form == "mxfp4" else 16
    codes = torch.randint(0, 16, (rows, columns), generator=draw)
    numbers = VALUES[codes % 8] * torch.where(codes < 8, 1.0, -1.0)
    packed = (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8)
    if form == "mxfp4":
        exponents = torch.randint(121, 125, (rows, columns // block), generator=draw)
        found = {"weight_packed": packed, "weight_scale": exponents.to(torch.uint8)}
        scales = 2.0 ** (exponents - 127)
    else:
        stored = (torch.rand(rows, columns // block, generator=draw) * 400 + 40).to(E4M3)
        if form == "modelopt":
            whole = torch.tensor(1.1e-4)
            found = {
                "weight": packed,
                "weight_scale": stored,
                "weight_scale_2": whole,
                "input_scale": torch.tensor(0.01),
            }
            scales = stored.float() * whole
        else:
            whole = torch.tensor([9000.0])
            found = {"weight_packed": packed, "weight_scale": stored, "weight_global_scale": whole}
            found["input_global_scale"] = torch.tensor([300.0])
            scales = stored.float() / whole
    return found, numbers * scales.repeat_interleave(block, dim=1)


def write_both(folder: Path, family: str, form: str) -> tuple[Path, Path]:
    """A checkpoint with what the codes stand for, and one with the codes."""
    plain, packed = folder / "plain", folder / "packed"
    fields = {"moe_intermediate_size": 64} if family == "qwen3_moe" else {}
    make_tiny_checkpoint(plain, family, with_tokenizer=False, **fields)
    shutil.copytree(plain, packed)
    tensors, small = load_file(plain / "model.safetensors"), {}
    for name, tensor in list(tensors.items()):
        if name.endswith("_proj.weight") and KEPT not in name:
            found, tensors[name] = in_four_bits(tensor, form)
            small |= {f"{name.removesuffix('.weight')}.{suffix}": part for suffix, part in found.items()}
        else:
            small[name] = tensor
    save_file(tensors, plain / "model.safetensors")
    save_file(small, packed / "model.safetensors")
    config = json.loads((packed / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps({**config, "quantization_config": FORMS[form]}))
    return plain, packed


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("form", FORMS)
def test_ids_equal_those_of_the_decoded_checkpoint(form: str, family: str, tmp_path: Path) -> None:
    prompts, answers = make_prompts(VOCAB_SIZE, (1, 17, 60)), []
    for folder in write_both(tmp_path, family, form):
        with make_llm(str(folder), dtype="float32") as llm:
            answers.append(generate(llm, prompts, greedy(12)))
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("form", "name", "change", "says"),
    [
        ("modelopt", "weight_scale_2", lambda whole: whole.repeat(2), r"q_proj\.weight_scale_2 is \[2\]; expected one number"),
        ("modelopt", "weight_scale", lambda scales: scales.float(), r"q_proj\.weight_scale is float32, .* says it is float8_e4m3fn"),
        ("nvfp4", "weight_packed", lambda codes: codes.view(torch.int8), r"q_proj\.weight_packed is int8, .* says it is uint8"),
        ("mxfp4", "weight_scale", lambda scales: scales[:, :1], r"q_proj\.weight_scale is \[.*, 1\]; config\.json makes it"),
        ("mxfp4", "weight_scale", lambda scales: scales.float(), r"q_proj\.weight_scale is float32, .* says it is uint8"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(form: str, name: str, change: Any, says: str, tmp_path: Path) -> None:
    _, packed = write_both(tmp_path, "llama", form)
    tensors = load_file(packed / "model.safetensors")
    name = f"model.layers.0.self_attn.q_proj.{name}"
    save_file(tensors | {name: change(tensors[name]).contiguous()}, packed / "model.safetensors")
    with pytest.raises(ConfigError, match=says):
        make_llm(str(packed))
