"""int8 of compressed-tensors and bitsandbytes, and bitsandbytes' four bits, against transformers in float32 with what the numbers say."""

import json

import pytest
import torch
from pelton_grouped import four_bits
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from pelton.config import EngineConfig
from pelton.errors import ConfigError
from pelton.layers.linear import LinearModule
from pelton.model.build import make_build_config
from pelton.model.resolve import resolve_model
from pelton.plugins import load_plugins
from pelton.testing.model_driver import ModelDriver
from pelton.testing.models import make_tiny_checkpoint
from pelton_plugins.quantization import bitsandbytes as bitsandbytes_module
from pelton_plugins.quantization import grouped

PLUGINS = load_plugins(only=[])
PROMPT = [5, 9, 200, 31, 77, 4, 18, 250, 13, 13, 90, 2]


def int_quantized(strategy="channel", *, symmetric=True, inputs=True, **changed):
    weights = {
        "type": "int",
        "num_bits": 8,
        "strategy": strategy,
        "symmetric": symmetric,
        "group_size": 32 if strategy == "group" else None,
    }
    group = {"targets": ["Linear"], "weights": weights | changed}
    if inputs:
        group["input_activations"] = {"type": "int", "num_bits": 8, "strategy": "token", "dynamic": True}
    return {
        "quant_method": "compressed-tensors", "format": "int-quantized", "ignore": ["lm_head"], "config_groups": {"group_0": group},
    }  # fmt: skip


def bitsandbytes(**settings):
    return {"quant_method": "bitsandbytes", "llm_int8_skip_modules": None, **settings}


FORMS = {
    "w8a8": int_quantized(),
    "w8a8-tensor-static": int_quantized("tensor"),
    "w8-groups-zeros": int_quantized("group", symmetric=False, inputs=False),
    "bnb-int8": bitsandbytes(load_in_8bit=True),
    "bnb-nf4": bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_quant_storage="uint8"),
    "bnb-nf4-double": bitsandbytes(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, llm_int8_skip_modules=["lm_head", "o_proj"]
    ),
}  # fmt: skip


def integers(weight, settings):
    """(tensors of the checkpoint, what they say)"""
    scheme = settings["config_groups"]["group_0"]["weights"]
    size = {"tensor": weight.numel(), "channel": weight.shape[1], "group": 32}[scheme["strategy"]]
    groups = weight.view(-1, size)
    if scheme["symmetric"]:
        scale, zero = groups.abs().amax(1, keepdim=True) / 127.5, torch.zeros(len(groups), 1)
    else:
        low, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
        scale = (high - low) / 255
        zero = (-128 - low / scale).round()
    scale = scale.half().float()
    codes = (groups / scale + zero).round().clamp(-128, 127)
    shape = (1,) if scheme["strategy"] == "tensor" else (weight.shape[0], -1)
    found = {"weight": codes.to(torch.int8).view(weight.shape), "weight_scale": scale.view(shape)}
    if not scheme["symmetric"]:
        found["weight_zero_point"] = zero.to(torch.int8).view(shape)
    if scheme["strategy"] == "tensor":
        found |= {"input_scale": torch.tensor([0.1]), "input_zero_point": torch.tensor([0], dtype=torch.int8)}
    return found, ((codes - zero) * scale).view(weight.shape)


def rows_of_bytes(weight):
    largest = weight.abs().amax(1)
    codes = (weight / largest[:, None] * 127).round()
    found = {"weight": codes.to(torch.int8), "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return found, codes * largest[:, None] / 127


def quantize_checkpoint(path, settings):
    """In place; return what the matrices are now."""
    (file,) = path.glob("*.safetensors")
    tensors, says = {}, {}
    for name, tensor in load_file(file).items():
        if not name.endswith("_proj.weight") or any(
            part in name for part in settings.get("llm_int8_skip_modules") or ()
        ):
            tensors[name] = tensor
            continue
        if settings["quant_method"] == "compressed-tensors":
            found, says[name] = integers(tensor.float(), settings)
        elif settings.get("load_in_8bit"):
            found, says[name] = rows_of_bytes(tensor.float())
        else:
            found, says[name] = four_bits(tensor.float(), settings)
        tensors |= {f"{name.removesuffix('.weight')}.{suffix}": part.contiguous() for suffix, part in found.items()}
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    save_file(tensors, file, metadata={"format": "pt"})
    return says


def driver(path, **flat):
    config = EngineConfig.from_flat(model=str(path), **flat)
    model = resolve_model(config, PLUGINS)
    made = make_build_config(
        config, model, PLUGINS, device=torch.device("cpu"), max_num_seqs=4, max_num_batched_tokens=64
    )
    return ModelDriver(path, plugins=PLUGINS, quantization=made.quantization)


def make(folder, family="llama"):
    return make_tiny_checkpoint(
        folder, family, with_tokenizer=False, hidden_size=128, intermediate_size=192, head_dim=32
    )


@pytest.mark.parametrize("family", ["qwen2", "phi3"])
@pytest.mark.parametrize("form", FORMS)
def test_logits_are_those_of_transformers_with_the_dequantized_weights(form, family, tmp_path, monkeypatch):
    path, twin = make(tmp_path / "m", family), make(tmp_path / "twin", family)
    settings = FORMS[form]
    says = quantize_checkpoint(path, settings)
    model = AutoModelForCausalLM.from_pretrained(twin, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        exact = model(torch.tensor([PROMPT])).logits[0]
        for name, weight in says.items():
            model.get_parameter(name).data = weight
        want = model(torch.tensor([PROMPT])).logits[0]
    for kept_as in ("blocks", "groups"):  # of the CPU, of GPUs
        run = driver(path)
        got = torch.cat([run.step({"a": PROMPT[:7]})["a"], run.step({"a": PROMPT[7:]})["a"]])
        # Blocks: inputs have 16 bits, scales are rounded to float16. Groups keep 16 of a float32's 24 bits.
        is_exact = kept_as == "groups" or "nf4" in form
        forms = {module.spec.weight_format for module in run.model.modules() if isinstance(module, LinearModule)}
        assert ("nf4" in forms) == (kept_as == "groups" and "nf4" in form), forms
        assert (got - want).norm() < (5e-5 if is_exact else 2e-3) * want.norm()
        assert (got - exact).norm() > 1e-3 * exact.norm()
        monkeypatch.setattr(bitsandbytes_module, "is_for_cpu", lambda config: False)
        monkeypatch.setattr(grouped, "_Blocks", grouped._Groups)
        monkeypatch.setattr(grouped, "_Dequantized", grouped._Groups)


REFUSED = [
    pytest.param(bitsandbytes(), r"neither load_in_8bit nor load_in_4bit", id="neither"),
    pytest.param(
        bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_quant_storage="bfloat16"),
        r"bnb_4bit_quant_storage 'bfloat16'; served is 'uint8'", id="storage",
    ),
    pytest.param(bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="int4"), r"quant_type 'int4'; served are nf4", id="kind"),
    pytest.param(int_quantized(num_bits=4), r"has 4 bits in the format 'int-quantized'", id="bits"),
    pytest.param(int_quantized(type="float"), r"type 'float', strategy 'channel'.*served is int, group or channel or tensor", id="type"),
]  # fmt: skip


@pytest.mark.parametrize("settings, message", REFUSED)
def test_what_is_not_served_is_refused_by_name(settings, message, tmp_path):
    path = make(tmp_path / "m")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    with pytest.raises(ConfigError, match=message):
        driver(path)


def test_numbers_that_are_not_what_config_says_are_refused(tmp_path):
    for form, message in (("bnb-int8", r"weight is float32.*says it is int8"), ("bnb-nf4", r"float32 for a matrix of")):
        path = make(tmp_path / form)
        quantize_checkpoint(path, FORMS[form])
        (file,) = path.glob("*.safetensors")
        tensors = load_file(file)
        name = "model.layers.0.mlp.down_proj.weight"
        save_file({**tensors, name: tensors[name].float()}, file, metadata={"format": "pt"})
        with pytest.raises(ConfigError, match=message):
            driver(path)


def test_tables_and_blocks_that_are_not_bitsandbytes_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(bitsandbytes_module, "is_for_cpu", lambda config: False)
    path = make(tmp_path / "m")
    quantize_checkpoint(path, FORMS["bnb-nf4"])
    (file,) = path.glob("*.safetensors")
    tensors, name = load_file(file), "model.layers.0.mlp.down_proj.weight"
    state = json.loads(bytes(tensors[f"{name}.quant_state.bitsandbytes__nf4"].tolist()))
    wrong = torch.tensor(list(json.dumps(state | {"blocksize": 32}).encode()), dtype=torch.uint8)
    for changed, message in (
        ({f"{name}.quant_map": tensors[f"{name}.quant_map"] * 2}, "quant_map is not the table of nf4"),
        ({f"{name}.quant_state.bitsandbytes__nf4": wrong}, "has blocksize 32; served are multiples of 64"),
    ):
        save_file(tensors | changed, file, metadata={"format": "pt"})
        with pytest.raises(ConfigError, match=message):
            driver(path)


def test_a_method_without_its_checkpoint_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match=r"quantization is 'bitsandbytes', and config\.json has no"):
        driver(make(tmp_path / "m"), quantization="bitsandbytes")
