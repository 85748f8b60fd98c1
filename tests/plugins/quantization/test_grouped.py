"""AWQ, GPTQ and packed compressed-tensors checkpoints, written here by the formats' published layouts, against transformers in float32
whose matrices are what their numbers say."""

import json
from dataclasses import replace
from zlib import crc32

import numpy as np
import pytest
import torch
from pelton_grouped import Form, quantize, tensors_of
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from pelton import LLM, SamplingParams
from pelton.config import EngineConfig
from pelton.errors import ConfigError
from pelton.model.build import make_build_config
from pelton.model.resolve import resolve_model
from pelton.plugins import load_plugins
from pelton.testing.model_driver import ModelDriver
from pelton.testing.models import make_tiny_checkpoint
from pelton_plugins.quantization import grouped

PLUGINS = load_plugins(only=[])
PROMPT = [5, 9, 200, 31, 77, 4, 18, 250, 13, 13, 90, 2]
SIZES = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32}


FORMS = {
    "awq": Form("awq"),
    "awq-left-out": Form("awq", 4, 64, settings={"modules_to_not_convert": ["o_proj"]}, kept=("lm_head", "o_proj")),
    "gptq": Form("gptq", is_symmetric=True),
    "gptq-ordered": Form("gptq", 4, 32, is_ordered=True),
    "gptq-8-whole": Form("gptq", 8, -1, is_symmetric=True, settings={"checkpoint_format": "gptq_v2"}),
    "gptq-8-zeros-head": Form("gptq", 8, 64, settings={"lm_head": True}, kept=()),
    "packed": Form("compressed-tensors", is_symmetric=True),
    "packed-zeros-ordered": Form("compressed-tensors", 4, 64, is_ordered=True),
    "packed-8-channel": Form(
        "compressed-tensors", 8, -1, is_symmetric=True, settings={"ignore": ["lm_head", "re:.*layers.1.*"]},
        kept=("lm_head", "layers.1."),
    ),
}  # fmt: skip


def is_matrix(name, form):
    return (name.endswith("_proj.weight") or name == "lm_head.weight") and not any(part in name for part in form.kept)


def seed_of(name):
    """Matrices with the same inputs were quantized in the same order."""
    return crc32(repr((name.split(".")[2:3], name.split(".")[-2] in ("o_proj", "down_proj"), "mlp" in name)).encode())


def quantize_checkpoint(path, form):
    """In place; return what the matrices are now."""
    (file,) = path.glob("*.safetensors")
    tensors, weights = {}, {}
    for name, tensor in load_file(file).items():
        if not is_matrix(name, form):
            tensors[name] = tensor
            continue
        made = quantize(tensor, form, seed_of(name))
        weights[name] = made.weight
        module = name.removesuffix(".weight")
        tensors |= {f"{module}.{suffix}": part.contiguous() for suffix, part in tensors_of(made, form).items()}
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": form.config}))
    save_file(tensors, file, metadata={"format": "pt"})
    return weights


def reference_logits(path, weights, prompt=PROMPT):
    """transformers on the checkpoint as it was, with these matrices."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    for name, weight in weights.items():
        model.get_parameter(name).data = weight
    with torch.inference_mode():
        return model(torch.tensor([prompt])).logits[0]


def driver(path, dtype=torch.float32, **flat):
    config = EngineConfig.from_flat(model=str(path), **flat)
    model = resolve_model(config, PLUGINS)
    made = make_build_config(
        config, model, PLUGINS, device=torch.device("cpu"), max_num_seqs=4, max_num_batched_tokens=64
    )
    return ModelDriver(path, plugins=PLUGINS, dtype=dtype, quantization=made.quantization)


def make(tmp_path, form, family="llama", **fields):
    path = make_tiny_checkpoint(tmp_path / "m", family, with_tokenizer=False, **SIZES, **fields)
    twin = make_tiny_checkpoint(tmp_path / "twin", family, with_tokenizer=False, **SIZES, **fields)
    return path, twin, quantize_checkpoint(path, form)


def logits_in_pieces(run):
    return torch.cat(
        [
            run.step({"a": PROMPT[:7]})["a"],
            run.step({"a": PROMPT[7:8]})["a"],
            run.step({"a": PROMPT[8:], "b": [3]})["a"],
        ]
    )


@pytest.mark.parametrize("kept_as", ["groups", "blocks"])
@pytest.mark.parametrize("form", FORMS)
def test_logits_are_those_of_transformers_with_the_dequantized_weights(form, kept_as, tmp_path, monkeypatch):
    form = FORMS[form]
    path, twin, weights = make(tmp_path, form, "qwen2")
    want, exact = reference_logits(twin, weights), reference_logits(twin, {})
    if kept_as == "groups":
        monkeypatch.setattr(grouped, "_Blocks", grouped._Groups)
        monkeypatch.setattr(grouped, "_Dequantized", grouped._Groups)
    run = driver(path)
    got = logits_in_pieces(run)
    # Blocks: inputs have 16 bits, and a minimum takes the place of a zero point.
    assert (got - want).norm() < (1e-5 if kept_as == "groups" else 2e-3) * want.norm()
    assert (got - exact).norm() > 1e-3 * exact.norm() or form.bits == 8
    formats = {choice.needs.linear.weight_format for choice in run.build.ops.choices if choice.op == "linear"}
    assert {"groups": {4: "int4_grouped", 8: "int8_grouped"}[form.bits]}.get(kept_as, "q") in "".join(formats) or (
        kept_as == "blocks" and form.bits == 8 and not form.is_symmetric
    )


def test_a_merged_tensor_is_taken_apart(tmp_path):
    """phi3's qkv_proj and gate_up_proj are one tensor each in the checkpoint."""
    pytest.importorskip("pelton_plugins.models.phi3")
    form = FORMS["gptq-ordered"]
    path, twin, weights = make(tmp_path, form, "phi3")
    want = reference_logits(twin, weights)
    got = logits_in_pieces(driver(path))
    assert (got - want).norm() < 2e-3 * want.norm()


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False, "lm_head": False}
DYNAMIC = {"lm_head": {}, "-:.*down_proj": {}, r"+:.*\.(o|v)_proj": {"bits": 8, "group_size": -1}}
AUTO_ROUND = {
    "quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True, "data_type": "int", "packing_format": "auto_round:auto_gptq",
    "extra_config": {
        "model.layers.0.mlp.down_proj": {"bits": 16, "data_type": "float"}, r"layers\.[1]\.mlp\.down_proj": {"bits": 16},
        **{f"model.layers.{layer}.self_attn.{one}_proj": {"bits": 8, "group_size": -1} for layer in (0, 1) for one in "ov"},
    },
}  # fmt: skip


@pytest.mark.parametrize("settings", [GPTQ | {"dynamic": DYNAMIC}, AUTO_ROUND], ids=["dynamic", "auto-round"])
def test_matrices_that_differ_by_their_names(settings, tmp_path):
    """Of q, k and v, which are merged, one has 8 bits. GPTQ's biases of nothing are as some writers have them."""
    forms = {True: Form("gptq", 8, -1, is_symmetric=True), False: FORMS["gptq"]}
    sizes = SIZES | {"num_hidden_layers": 2}
    path, twin = (make_tiny_checkpoint(tmp_path / n, "llama", with_tokenizer=False, **sizes) for n in ("m", "twin"))
    (file,) = path.glob("*.safetensors")
    tensors, weights = load_file(file), {}
    for name in [name for name in tensors if name.endswith("_proj.weight") and "down_proj" not in name]:
        module, form = name.removesuffix(".weight"), forms[name.endswith(("o_proj.weight", "v_proj.weight"))]
        made = quantize(tensors.pop(name), form, seed_of(name))
        weights[name], parts = made.weight, tensors_of(made, form)
        if "extra_config" in settings:
            parts.pop("g_idx")
        else:
            parts["bias"] = torch.zeros(len(made.weight))
        tensors |= {f"{module}.{suffix}": part.contiguous() for suffix, part in parts.items()}
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    want = reference_logits(twin, weights)
    assert (logits_in_pieces(driver(path)) - want).norm() < 2e-3 * want.norm()
    if "extra_config" not in settings:
        name = "model.layers.1.mlp.up_proj.bias"
        save_file(tensors | {name: tensors[name] + 1}, file, metadata={"format": "pt"})
        with pytest.raises(
            ConfigError, match=rf"has {name}, which is not zero, and config.json makes a model without it"
        ):
            driver(path)


def test_auto_round_in_the_layout_of_awq(tmp_path):
    form = Form("awq", settings={"quant_method": "auto-round", "packing_format": "auto_round:auto_awq", "sym": False})
    own = {f"model.layers.{layer}.self_attn.o_proj": {"bits": 16} for layer in range(4)}
    form = replace(form, settings=form.settings | {"extra_config": own}, kept=("lm_head", "o_proj"))
    path, twin, weights = make(tmp_path, form, num_hidden_layers=1)
    want = reference_logits(twin, weights)
    assert (logits_in_pieces(driver(path)) - want).norm() < 2e-3 * want.norm()


def test_the_engine_gives_the_same_ids_alone_and_together(tmp_path):
    path, _, _ = make(tmp_path, FORMS["awq"])
    settings = {"max_model_len": 64, "max_num_seqs": 4, "kv_cache_memory_bytes": 2**22, "dtype": "float32"}
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    prompts = [{"prompt_token_ids": PROMPT[:length]} for length in (3, 12, 7)]
    with LLM(model=str(path), skip_tokenizer_init=True, disable_log_stats=True, **settings) as llm:
        together = [one.outputs[0].token_ids for one in llm.generate(prompts, params, use_tqdm=False)]
        alone = [llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids for prompt in prompts]
    assert together == alone


def test_dummy_weights_of_a_quantized_checkpoint(tmp_path):
    """What `bench table --models llama3.1-8b-w4` measures: packed words by chance, weights as large as those of other models."""
    path = make_tiny_checkpoint(tmp_path / "m", "llama", with_tokenizer=False, **SIZES, num_hidden_layers=1)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": FORMS["awq"].config}))
    settings = {"max_model_len": 64, "max_num_seqs": 2, "kv_cache_memory_bytes": 2**22, "dtype": "float32"}
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=2)
    with LLM(model=str(path), load_format="dummy", skip_tokenizer_init=True, disable_log_stats=True, **settings) as llm:
        (found,) = llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
    values = [entry.logprob for step in found.outputs[0].logprobs for entry in step.values()]
    assert all(np.isfinite(values)) and len(found.outputs[0].token_ids) == 4


REFUSED = [
    pytest.param(Form("gptq", settings={"bits": 2}), r"bits 2; served are 4, 8", id="bits"),
    pytest.param(Form("gptq", settings={"bits": 3}), r"bits 3; served are 4, 8", id="bits-3"),
    pytest.param(Form("gptq", settings={"checkpoint_format": "marlin"}), r"checkpoint_format 'marlin'", id="layout"),
    pytest.param(Form("gptq", settings={"dynamic": {"+:.*": {"bits": 3}}}), r"gptq, dynamic '\+:\.\*'\) has bits 3", id="dynamic"),
    pytest.param(Form("gptq", settings={"dynamic": {"+:*mlp": {"bits": 8}}}), r"modules by '\*mlp', which is no regular", id="expression"),
    pytest.param(Form("gptq", settings=AUTO_ROUND | {"data_type": "mx_fp"}), "data_type 'mx_fp'; served is 'int'", id="auto-round-type"),
    pytest.param(
        Form("gptq", settings=AUTO_ROUND | {"packing_format": "auto_round:other"}), "packing_format 'auto_round:other'", id="auto-round"
    ),
    pytest.param(
        Form("awq", settings=AUTO_ROUND | {"packing_format": "auto_round:auto_awq"}), r"'model\.layers\.0\.self_attn\.o_proj' in extra",
        id="auto-round-awq",
    ),
    pytest.param(Form("awq", settings={"version": "gemv"}), r"version 'gemv'; served is 'gemm'", id="version"),
    pytest.param(Form("awq", settings={"zero_point": False}), r"zero_point false", id="no-zero-points"),
    pytest.param(Form("compressed-tensors", settings={"format": "marlin-24"}), r"format 'marlin-24'", id="marlin-24"),
    pytest.param(
        Form("compressed-tensors", settings={"sparsity_config": {"format": "sparse-24-bitmask"}}),
        r"sparsity format 'sparse-24-bitmask'; served is 'dense'", id="sparse",
    ),
    pytest.param(Form("gptq", settings={"group_size": 48}), r"groups of 48 columns.*served are groups of 32, 64", id="group"),
    pytest.param(Form("gptq", settings={"sym": True}), r"zero points other than 8", id="not-symmetric"),
    pytest.param(Form("gptq", 4, 32, is_ordered=True, settings={"desc_act": False}), r"g_idx is not in order", id="order"),
]  # fmt: skip


@pytest.mark.parametrize("form, message", REFUSED)
def test_what_is_not_served_is_refused_by_name(form, message, tmp_path):
    path = make_tiny_checkpoint(tmp_path / "m", "llama", with_tokenizer=False, **SIZES, num_hidden_layers=1)
    quantize_checkpoint(path, form)
    with pytest.raises(ConfigError, match=message):
        driver(path)


def test_a_method_without_its_checkpoint_is_an_error(tmp_path):
    path = make_tiny_checkpoint(tmp_path / "m", "llama", with_tokenizer=False, **SIZES, num_hidden_layers=1)
    for name in ("awq", "gptq"):
        with pytest.raises(ConfigError, match=f"quantization is '{name}'"):
            driver(path, quantization=name)


def test_a_missing_tensor_is_named(tmp_path):
    path, _, _ = make(tmp_path, FORMS["gptq"], num_hidden_layers=1)
    (file,) = path.glob("*.safetensors")
    tensors = load_file(file)
    tensors.pop("model.layers.0.mlp.down_proj.scales")
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"missing model\.layers\.0\.mlp\.down_proj\.scales"):
        driver(path)
