"""Checkpoints in e4m3 with a scale for each block of a matrix, against transformers in float32 with the weights that they say."""

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from pelton.config import EngineConfig
from pelton.errors import ConfigError
from pelton.model.build import make_build_config
from pelton.model.resolve import resolve_model
from pelton.ops.interface import InputRounding
from pelton.plugins import load_plugins
from pelton.testing.model_driver import ModelDriver
from pelton.testing.models import make_tiny_checkpoint
from pelton_plugins.quantization.compressed_tensors import CompressedTensors
from pelton_plugins.quantization.fp8 import BlockFp8
from pelton_plugins.quantization.numbers import E4M3

PLUGINS = load_plugins(only=[])
PROMPT = [5, 9, 200, 31, 77, 4, 18, 250, 13, 13, 90, 2]
KEPT = ("lm_head", "layers.1.mlp")
DYNAMIC = InputRounding(dtype="float8_e4m3fn")


def compressed(block):
    number = {"type": "float", "num_bits": 8, "symmetric": True}
    group = {
        "targets": ["Linear"], "weights": {**number, "strategy": "block", "block_structure": list(block), "dynamic": False},
        "input_activations": {**number, "strategy": "group", "group_size": block[1], "dynamic": True},
    }  # fmt: skip
    return {
        "quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group},
        "ignore": [f"re:.*{name}.*" for name in KEPT],
    }  # fmt: skip


def quantize_checkpoint(path, block, twin, *, is_compressed=False):
    """In place; the twin gets what the blocks say, in float32."""
    rows, columns = block
    (file,), (other,) = path.glob("*.safetensors"), twin.glob("*.safetensors")
    tensors, says = {}, {}
    for name, tensor in load_file(file).items():
        tensors[name] = says[name] = tensor
        if not name.endswith("_proj.weight") or any(part in name for part in KEPT):
            continue
        scales = torch.zeros(-(-tensor.shape[0] // rows), -(-tensor.shape[1] // columns))
        numbers, says[name] = torch.zeros(tensor.shape, dtype=E4M3), torch.zeros(tensor.shape)
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                place = (slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))
                scales[i, j] = tensor[place].abs().max() / 448
                numbers[place] = (tensor[place] / scales[i, j]).to(E4M3)
                says[name][place] = numbers[place].float() * scales[i, j]
        tensors[name], tensors[f"{name}_scale" if is_compressed else f"{name}_scale_inv"] = numbers, scales
    save_file(tensors, file, metadata={"format": "pt"})
    save_file(says, other, metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    settings = {"quant_method": "fp8", "weight_block_size": list(block), "modules_to_not_convert": list(KEPT)}
    settings = compressed(block) if is_compressed else settings
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))


def driver(path):
    config = EngineConfig.from_flat(model=str(path))
    model = resolve_model(config, PLUGINS)
    made = make_build_config(
        config, model, PLUGINS, device=torch.device("cpu"), max_num_seqs=4, max_num_batched_tokens=64
    )
    return ModelDriver(path, plugins=PLUGINS, quantization=made.quantization)


@pytest.mark.parametrize(
    "family, block, is_compressed",
    [("qwen2", (32, 32), False), ("llama", (24, 40), False), ("phi3", (16, 32), False), ("qwen2", (24, 32), True)],
)
def test_logits_are_those_of_transformers_with_the_dequantized_weights(family, block, is_compressed, tmp_path):
    path, twin = (make_tiny_checkpoint(tmp_path / name, family, with_tokenizer=False) for name in ("m", "twin"))
    quantize_checkpoint(path, block, twin, is_compressed=is_compressed)
    model = AutoModelForCausalLM.from_pretrained(twin, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        want = model(torch.tensor([PROMPT])).logits[0]
    run = driver(path)
    got = torch.cat([run.step({"a": PROMPT[:7]})["a"], run.step({"a": PROMPT[7:]})["a"]])
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "family, is_compressed", [("qwen2", False), ("llama", False), ("phi3", False), ("qwen2", True)]
)
def test_packed_matrices_are_those_that_are_decoded(family, is_compressed, tmp_path, monkeypatch):
    """As on GPUs, with the torch op; a merged tensor, and parts that begin within a block, too."""
    path, twin = (make_tiny_checkpoint(tmp_path / name, family, with_tokenizer=False) for name in ("m", "twin"))
    quantize_checkpoint(path, (24, 32), twin, is_compressed=is_compressed)
    decoded = driver(path).step({"a": PROMPT})["a"]
    monkeypatch.setattr(BlockFp8, "create", create_packed_where_it_can)
    run = driver(path)
    specs = [choice.needs.linear for choice in run.build.ops.choices if choice.op == "linear"]
    assert {(spec.weight_format, spec.inputs) for spec in specs} == {("plain", None), ("fp8_blocks", DYNAMIC)}
    got = torch.cat(
        [run.step({"a": PROMPT[:7]})["a"], run.step({"a": PROMPT[7:8]})["a"], run.step({"a": PROMPT[8:]})["a"]]
    )
    torch.testing.assert_close(got, decoded, atol=1e-4, rtol=1e-4)


def create_packed_where_it_can(self, config, shards, *, bias, is_vocabulary=False):
    size = None if is_vocabulary else self._group_size(shards)
    if size is None:
        return self.decoded.create(config, shards, bias=bias, is_vocabulary=is_vocabulary)
    return self.create_packed(config, shards, size, bias=bias)


@pytest.mark.parametrize(
    "scheme, inputs",
    [({}, DYNAMIC), ({"activation_scheme": "dynamic"}, DYNAMIC), ({"activation_scheme": None}, DYNAMIC),
     ({"activation_scheme": "static"}, None)],
)  # fmt: skip
def test_inputs_may_be_rounded_by_scales_that_are_made_of_them(scheme, inputs):
    assert BlockFp8({"weight_block_size": [128, 128], **scheme}).inputs == inputs


@pytest.mark.parametrize("is_rounded", [True, False])
def test_inputs_may_be_rounded_where_the_group_has_them_rounded(is_rounded):
    settings = compressed((128, 128))
    if not is_rounded:
        settings["config_groups"]["group_0"]["input_activations"] = None
    model = SimpleNamespace(hf_config={"quantization_config": settings})
    method = CompressedTensors(EngineConfig(), model).method_of(SimpleNamespace(name="model.layers.0.mlp.down_proj"))
    assert isinstance(method, BlockFp8) and method.inputs == (DYNAMIC if is_rounded else None)


def test_weights_that_are_not_e4m3_are_named(tmp_path):
    path, twin = (make_tiny_checkpoint(tmp_path / name, "llama", with_tokenizer=False) for name in ("m", "twin"))
    quantize_checkpoint(path, (32, 32), twin)
    (file,) = path.glob("*.safetensors")
    tensors = load_file(file)
    name = "model.layers.0.mlp.down_proj.weight"
    save_file({**tensors, name: tensors[name].float()}, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=rf"{name} is float32.*says it is float8_e4m3fn"):
        driver(path)
