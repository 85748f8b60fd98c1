"""Models with e4m3 weights, of each form of checkpoint and rounded as they load, against transformers in float32."""

import json
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from pelton import LLM, SamplingParams
from pelton.config import EngineConfig
from pelton.errors import ConfigError
from pelton.model.build import make_build_config
from pelton.model.registry import build_model
from pelton.model.resolve import resolve_model
from pelton.ops.interface import InputRounding
from pelton.parallel.context import ParallelContext
from pelton.plugins import load_plugins
from pelton.quantization.interface import LinearShard
from pelton.testing.model_driver import ModelDriver, TensorWeight, checkpoint_weights
from pelton.testing.models import make_tiny_checkpoint
from pelton_plugins.models import experts
from pelton_plugins.quantization import fp8
from pelton_plugins.quantization.compressed_tensors import CompressedTensors
from pelton_plugins.quantization.fp8 import DYNAMIC
from pelton_plugins.quantization.module_names import is_part_of

PLUGINS = load_plugins(only=[])
PROMPT = [5, 9, 200, 31, 77, 4, 18, 250, 13, 13, 90, 2]
E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Form:
    """How a checkpoint is quantized, in the words of its own config.json."""

    settings: dict
    per_row: bool
    inputs: str | None = "token"  # token, tensor, or not rounded
    bound: float | None = None
    kept: tuple[str, ...] = ("lm_head",)
    names: tuple[str, str] = ("weight_scale", "input_scale")


def compressed(strategy, inputs, **settings):
    rounded = inputs and {
        "type": "float", "num_bits": 8, "symmetric": True, "strategy": inputs, "dynamic": inputs == "token",
    }  # fmt: skip
    weights = {"type": "float", "num_bits": 8, "symmetric": True, "strategy": strategy, "dynamic": False}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": rounded}
    return {
        "quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"],
        "config_groups": {"group_0": group}, **settings,
    }  # fmt: skip


def quark(inputs, *, is_dynamic, weight="fp8_e4m3"):
    spec = {"dtype": weight, "qscheme": "per_channel" if is_dynamic else "per_tensor", "is_dynamic": False}
    whole = {"weight": spec, "input_tensors": {"dtype": "fp8_e4m3", "qscheme": inputs, "is_dynamic": is_dynamic}}
    layers = {"*k_proj": whole | {"output_tensors": spec}}  # for the cache
    return {"quant_method": "quark", "global_quant_config": whole, "layer_quant_config": layers, "exclude": ["lm_head"]}


MIXED = ["lm_head", "re:.*layers.1.*", "model.layers.2.self_attn.o_proj"]
FORMS = {
    "compressed-channel-token": Form(compressed("channel", "token"), per_row=True),
    "compressed-tensor-tensor": Form(compressed("tensor", "tensor"), per_row=False, inputs="tensor"),
    "compressed-weights-only": Form(compressed("tensor", None), per_row=False, inputs=None),
    "compressed-mixed": Form(
        compressed("channel", "token", ignore=MIXED), per_row=True,
        kept=("lm_head", "layers.1.", "layers.2.self_attn.o_proj"),
    ),
    "fbgemm": Form(
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 2.0, "modules_to_not_convert": ["lm_head", "layers.0.mlp"]},
        per_row=True, bound=2.0, kept=("lm_head", "layers.0.mlp"),
    ),
    "compressed-parts-differ": Form(
        compressed("channel", None, ignore=["lm_head", "model.layers.0.self_attn.k_proj"]), per_row=True, inputs=None,
        kept=("lm_head", "layers.0.self_attn.k_proj"),
    ),
    "compressed-head": Form(compressed("channel", None, ignore=[]), per_row=True, inputs=None, kept=()),
    "modelopt": Form(
        {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head", "model.layers.0.mlp*"]}, per_row=False,
        inputs="tensor", kept=("lm_head", "layers.0.mlp"),
    ),
    "quark": Form(quark("per_channel", is_dynamic=True), per_row=True),
    "serialized-by-transformers": Form(
        {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None, "modules_to_not_convert": ["lm_head"]},
        per_row=False, inputs="tensor", names=("weight_scale_inv", "activation_scale"),
    ),
    "serialized-static": Form(
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}, per_row=False, inputs="tensor"
    ),
}  # fmt: skip


def round_weight(weight, per_row):
    """(e4m3, scale [out, 1] or [1])"""
    largest = weight.abs().amax(-1, keepdim=True) if per_row else weight.abs().amax().reshape(1)
    scale = largest / 448
    return (weight / scale).to(E4M3), scale


def is_matrix(name, form):
    return name.endswith(("_proj.weight", "lm_head.weight")) and not any(part in name for part in form.kept)


def input_scale_of(name):
    return 0.01 if "q_proj" in name else 0.008  # of q, k and v the largest counts


def quantize_checkpoint(path, form):
    """In place."""
    (file,) = path.glob("*.safetensors")
    tensors = {}
    for name, tensor in load_file(file).items():
        if not is_matrix(name, form):
            tensors[name] = tensor
            continue
        tensors[name], scale = round_weight(tensor, form.per_row)
        module = name.removesuffix(".weight")
        tensors[f"{module}.{form.names[0]}"] = scale
        if form.inputs == "tensor":
            tensors[f"{module}.{form.names[1]}"] = torch.tensor([input_scale_of(name)])
        if form.bound:
            tensors[f"{module}.input_scale_ub"] = torch.tensor([form.bound])
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": form.settings}))


def rounding(form, name):
    """What happens to the inputs of a matrix, in float32."""

    def round_inputs(module, args):
        (x,) = args
        if form.inputs == "tensor":
            scale = torch.tensor(max(input_scale_of(name), 0.01 if "self_attn" in name and "o_proj" not in name else 0))
        else:
            scale = x.abs().amax(-1, keepdim=True)
            scale = (scale if form.bound is None else scale.clamp(max=form.bound)) / 448
        return ((x * (1.0 / scale)).clamp(-448, 448).to(E4M3).float() * scale,)

    return round_inputs


def reference_logits(path, form, prompt):
    """transformers on the checkpoint before it is quantized, its matrices replaced by what the quantized ones say."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    for name, module in model.named_modules():
        if is_matrix(f"{name}.weight", form):
            numbers, scale = round_weight(module.weight.data, form.per_row)
            module.weight.data = numbers.float() * scale
            if form.inputs is not None:
                module.register_forward_pre_hook(rounding(form, name))
    with torch.inference_mode():
        return model(torch.tensor([prompt])).logits[0]


def driver(path, dtype=torch.float32, **flat):
    config = EngineConfig.from_flat(model=str(path), **flat)
    model = resolve_model(config, PLUGINS)
    made = make_build_config(
        config, model, PLUGINS, device=torch.device("cpu"), max_num_seqs=4, max_num_batched_tokens=64
    )
    return ModelDriver(path, plugins=PLUGINS, dtype=dtype, quantization=made.quantization)


def assert_same(got, want):
    """An input that lies between two numbers of e4m3 may be rounded to either."""
    assert (got - want).norm() < 1e-2 * want.norm()
    best = want.topk(2).values
    is_clear = best[:, 0] - best[:, 1] > 0.1
    assert is_clear.float().mean() > 0.7
    assert torch.equal(got.argmax(-1)[is_clear], want.argmax(-1)[is_clear])


@pytest.mark.parametrize(
    "form, family",
    [
        ("compressed-channel-token", "llama"), ("compressed-tensor-tensor", "qwen3"), ("compressed-weights-only", "gemma3"),
        ("compressed-mixed", "qwen2"), ("fbgemm", "llama"), ("serialized-static", "mistral"),
        ("compressed-channel-token", "phi3"),
    ],
)  # fmt: skip
def test_logits_are_those_of_transformers_with_the_dequantized_weights(form, family, tmp_path):
    form = FORMS[form]
    path = make_tiny_checkpoint(tmp_path / "m", family, with_tokenizer=False)
    want = reference_logits(path, form, PROMPT)
    exact = reference_logits(path, Form({}, per_row=True, kept=("_proj", "lm_head")), PROMPT)
    quantize_checkpoint(path, form)
    run = driver(path)
    got = run.step({"a": PROMPT[:7]})["a"]
    rest = [run.step({"a": PROMPT[7:8]})["a"], run.step({"a": PROMPT[8:], "b": [3]})["a"]]
    got = torch.cat([got, *rest])
    if form.inputs is None:
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    else:
        assert_same(got, want)
    assert (got - exact).norm() > 2e-2 * exact.norm()  # or the test says nothing
    formats = {choice.needs.linear.weight_format for choice in run.build.ops.choices if choice.op == "linear"}
    assert formats == ({"fp8_e4m3", "plain"} if len(form.kept) > 1 else {"fp8_e4m3"})


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_rounded_as_it_loads_is_the_checkpoint_with_a_scale_for_each_row(family, tmp_path):
    path = make_tiny_checkpoint(tmp_path / "m", family, with_tokenizer=False)
    got = driver(path, quantization="fp8").step({"a": PROMPT})["a"]
    form = FORMS["compressed-channel-token"]
    assert_same(got, reference_logits(path, form, PROMPT))
    quantize_checkpoint(path, form)
    assert_same(got, driver(path).step({"a": PROMPT})["a"])


def test_the_engine_gives_the_same_ids_alone_and_together(tmp_path):
    path = make_tiny_checkpoint(tmp_path / "m", "llama", with_tokenizer=False, dtype="bfloat16")
    settings = {"quantization": "fp8", "max_model_len": 64, "max_num_seqs": 4, "kv_cache_memory_bytes": 2**22}
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    prompts = [{"prompt_token_ids": PROMPT[:length]} for length in (3, 12, 7)]
    with LLM(model=str(path), skip_tokenizer_init=True, disable_log_stats=True, **settings) as llm:
        together = [one.outputs[0].token_ids for one in llm.generate(prompts, params, use_tqdm=False)]
        alone = [llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids for prompt in prompts]
    assert alone == together and all(len(ids) == 8 for ids in alone)


class Watched(TensorWeight):
    """Notes how many numbers are asked for at once."""

    most = 0

    def read(self, dim=None, start=0, stop=None):
        part = super().read(dim, start, stop)
        if part.dim() == 2:
            Watched.most = max(Watched.most, part.numel())
        return part


def test_weights_are_rounded_a_part_at_a_time(tmp_path, monkeypatch):
    path = make_tiny_checkpoint(tmp_path / "m", "llama", with_tokenizer=False)
    whole = driver(path, quantization="fp8")
    monkeypatch.setattr(fp8, "NUMBERS_AT_ONCE", 64 * 10)  # ten rows
    config = json.loads((path / "config.json").read_text())
    weights = [
        (name, (Watched if name.endswith("_proj.weight") else TensorWeight)(weight.read()))
        for name, weight in checkpoint_weights(path)
    ]
    cut = ModelDriver(hf_config=config, weights=weights, plugins=PLUGINS, quantization=fp8.Fp8AtLoad())
    assert 0 < Watched.most <= 640
    for one, other in zip(whole.model.parameters(), cut.model.parameters(), strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    matrices = [p for p in whole.model.parameters() if p.dim() == 2 and p.dtype == E4M3]
    assert len(matrices) == 4 * 4


@pytest.mark.parametrize("form", ["compressed-channel-token", "compressed-tensor-tensor"])
def test_each_rank_keeps_its_part_of_weights_and_scales(form, tmp_path):
    form = FORMS[form]
    path = make_tiny_checkpoint(tmp_path / "m", "llama", with_tokenizer=False)
    quantize_checkpoint(path, form)
    whole = driver(path).model.layers[0]

    def part(rank):
        made = driver(path).build
        hf = json.loads((path / "config.json").read_text())
        build = partial(type(made), hf=made.hf, dtype=made.dtype, device=made.device, max_model_len=64)
        config = build(
            ops=made.ops, attention=made.attention, parallel=ParallelContext(rank, 2), quantization=method_of(hf)
        )
        model = build_model(config, "LlamaForCausalLM", PLUGINS)
        model.load_weights(checkpoint_weights(path))
        return model.layers[0]

    first, second = part(0), part(1)
    bytes_of = lambda tensor: tensor.view(torch.uint8)  # noqa: E731
    down = torch.cat([bytes_of(one.down_proj.weight) for one in (first, second)], dim=1)
    assert torch.equal(down, bytes_of(whole.down_proj.weight))
    assert torch.equal(second.down_proj.weight_scale, whole.down_proj.weight_scale)
    for name in ("weight", "weight_scale"):
        gate, up = bytes_of(getattr(whole.gate_up_proj, name)).chunk(2)
        own = torch.cat([gate.chunk(2)[1], up.chunk(2)[1]])
        assert torch.equal(bytes_of(getattr(second.gate_up_proj, name)), own)


def method_of(hf):
    class Model:
        hf_config = hf

    return CompressedTensors(EngineConfig(), Model)


def test_merged_parts_share_the_largest_scale_of_their_input(tmp_path):
    path = make_tiny_checkpoint(tmp_path / "m", "llama", with_tokenizer=False)
    quantize_checkpoint(path, FORMS["compressed-tensor-tensor"])
    layer = driver(path).model.layers[1]
    assert layer.qkv_proj.input_scale.item() == pytest.approx(0.01)
    assert layer.o_proj.input_scale.item() == pytest.approx(0.008)
    assert layer.qkv_proj.spec.inputs == InputRounding(dtype="float8_e4m3fn", is_dynamic=False)
    assert len(layer.qkv_proj.weight_scale.unique()) == 3  # one for each of q, k and v


def changed(**group):
    settings = compressed("channel", "token")
    settings["config_groups"]["group_0"] |= group
    return settings


@pytest.mark.parametrize(
    "settings, message",
    [
        pytest.param(compressed("channel", "token", format="marlin-24"), "the format 'marlin-24'", id="format"),
        pytest.param(compressed("block", "tensor"), "dynamic False .*beside weights in blocks served is float, 8, dynamic", id="blocks"),
        pytest.param(compressed("block", None), r"has block_structure None \(group_0\); expected two sizes", id="block-sizes"),
        pytest.param(compressed("channel", "token", transform_config={"config_groups": {}}), "has a transform_config", id="transform"),
        pytest.param({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo 'W4A8_AWQ'; served are 'FP8'", id="modelopt"),
        pytest.param(quark("per_tensor", is_dynamic=False, weight="fp4"), r"weight \('fp4', 'per_tensor', False\)", id="quark"),
        pytest.param(quark("per_group", is_dynamic=True), r"input_tensors \('fp8_e4m3', 'per_group', True\)", id="quark-inputs"),
        pytest.param({"quant_method": "hqq"}, r"quant_method\) is 'hqq'; available: .*Take a checkpoint of one of these", id="method"),
        pytest.param(changed(weights={"type": "int", "num_bits": 8, "strategy": "channel"}), "of type 'int', 8 bits", id="int"),
        pytest.param(
            changed(input_activations={"type": "float", "num_bits": 8, "strategy": "group", "dynamic": True}),
            "strategy 'group', dynamic True", id="groups-of-inputs",
        ),
        pytest.param({"quant_method": "fp8", "weight_block_size": [128]}, r"weight_block_size is \[128\]", id="block"),
        pytest.param({"quant_method": "fp8", "activation_scheme": "odd"}, "activation_scheme is 'odd'", id="scheme"),
    ],
)  # fmt: skip
def test_what_is_not_served_is_named(settings, message, tmp_path):
    path = make_tiny_checkpoint(tmp_path / "m", "llama", with_tokenizer=False)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    with pytest.raises(ConfigError, match=message):
        driver(path)


def test_weights_that_are_not_what_config_says_are_refused(tmp_path):
    path = make_tiny_checkpoint(tmp_path / "m", "llama", with_tokenizer=False)
    form = FORMS["compressed-channel-token"]
    quantize_checkpoint(path, form)
    config = json.loads((path / "config.json").read_text())
    weights = {name: weight.read() for name, weight in checkpoint_weights(path)}
    name = "model.layers.0.self_attn.o_proj"

    def load(changed):
        pairs = [(key, TensorWeight(tensor)) for key, tensor in changed.items()]
        ModelDriver(hf_config=config, weights=pairs, plugins=PLUGINS, quantization=method_of(config))

    with pytest.raises(ConfigError, match=rf"{name}.weight is float32, and .* says it is float8_e4m3fn"):
        load(weights | {f"{name}.weight": weights[f"{name}.weight"].float()})
    with pytest.raises(ConfigError, match=rf"{name}.weight_scale is \[3\]; expected one number, or 64"):
        load(weights | {f"{name}.weight_scale": torch.ones(3)})
    with pytest.raises(ConfigError, match=rf"missing {name}.weight_scale"):
        load({key: tensor for key, tensor in weights.items() if key != f"{name}.weight_scale"})


def test_modules_are_left_out_by_name():
    modules = ["layers.1.mlp", "model.layers.2.", "re:.*o_proj$", "*.layers.3.*", "model.language_model.layers.4"]
    for name in ("1.mlp.up_proj", "2.self_attn.q_proj", "5.self_attn.o_proj", "3.mlp.up_proj", "4.mlp.up_proj"):
        assert is_part_of(f"model.layers.{name}", modules)
        assert is_part_of(f"language_model.model.layers.{name}", modules)
    for name in ("11.mlp.up_proj", "21.mlp.up_proj", "5.o_proj.x", "33.mlp.up_proj", "14.mlp.up_proj"):
        assert not is_part_of(f"model.layers.{name}", modules)
    assert not is_part_of("model.visual.blocks.4.attn.qkv", ["re:.*language_model.*"])


def test_of_two_groups_the_one_that_names_a_matrix_counts():
    rounded, plain = (compressed("channel", inputs)["config_groups"]["group_0"] for inputs in ("token", None))
    groups = {"group_0": rounded, "group_1": plain | {"targets": ["re:.*o_proj"]}}
    settings = compressed("channel", "token", config_groups=groups)
    made = CompressedTensors(EngineConfig(), SimpleNamespace(hf_config={"quantization_config": settings}))
    for name, inputs in (("q_proj", DYNAMIC), ("o_proj", None)):
        shard = LinearShard(f"model.layers.0.self_attn.{name}", 8, 8, (0, 8), (0, 8))
        assert made.method_of(shard).inputs_of(shard) == (True, inputs)


def in_blocks(inputs):
    settings = compressed("block", inputs)
    settings["config_groups"]["group_0"]["weights"]["block_structure"] = [32, 32]
    return settings


def by_name(inputs_of_down):
    """Rows of gate and up whose inputs are rounded, and down in a group of its own."""
    group, down = (compressed("channel", inputs)["config_groups"]["group_0"] for inputs in ("token", inputs_of_down))
    groups = {"group_0": group, "group_1": down | {"targets": ["re:.*down_proj"]}}
    return compressed("channel", "token", config_groups=groups)


EXPERTS = {
    "at-load": (None, DYNAMIC),
    "serialized": ({"quant_method": "fp8"}, DYNAMIC),
    "serialized-static": ({"quant_method": "fp8", "activation_scheme": "static"}, DYNAMIC),
    "serialized-blocks": ({"quant_method": "fp8", "weight_block_size": [32, 32]}, DYNAMIC),
    "compressed-token": (compressed("channel", "token"), DYNAMIC),
    "compressed-tensor": (compressed("tensor", "tensor"), DYNAMIC),
    "compressed-weights-only": (compressed("channel", None), None),
    "compressed-blocks": (in_blocks("token"), DYNAMIC),
    "compressed-blocks-weights-only": (in_blocks(None), None),
    "compressed-two-groups": (by_name("tensor"), DYNAMIC),
    "compressed-one-of-two-groups": (by_name(None), None),
    "quark": (quark("per_tensor", is_dynamic=False), DYNAMIC),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "FP8"}, DYNAMIC),
    "fbgemm": ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 2.0}, DYNAMIC),
}


@pytest.mark.parametrize("name", EXPERTS)
def test_inputs_of_experts_may_be_rounded_where_a_checkpoint_says_so(name, tmp_path, monkeypatch):
    """By a scale for each token, whatever it says of scales. Weights are kept as on GPUs."""
    monkeypatch.setattr(experts, "keeps_packed", lambda config: True)
    settings, inputs = EXPERTS[name]
    assert spec_of_experts(tmp_path, settings, None if settings else "fp8").inputs == inputs


def test_experts_that_are_decoded_have_inputs_as_they_are(tmp_path):
    assert spec_of_experts(tmp_path, {"quant_method": "fp8"}, weight_format="plain").inputs is None


def spec_of_experts(folder, settings, quantization=None, weight_format="e4m3"):
    path = make_tiny_checkpoint(folder / "m", "qwen3_moe", with_tokenizer=False)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | ({"quantization_config": settings} if settings else {})))
    config = EngineConfig.from_flat(model=str(path), quantization=quantization)
    made = make_build_config(
        config, resolve_model(config, PLUGINS), PLUGINS, device=torch.device("cpu"), max_num_seqs=4, max_num_batched_tokens=64,
    )  # fmt: skip
    build_model(made, "Qwen3MoeForCausalLM", PLUGINS)
    (spec,) = {choice.needs.experts for choice in made.ops.choices if choice.op == "moe"}
    assert spec.weight_format == weight_format
    return spec
