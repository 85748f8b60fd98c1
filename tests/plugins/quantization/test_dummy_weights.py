"""`--load-format dummy` of each quantized form: a plain folder's config.json with the form's settings is enough."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from pelton_e2e import make_llm, make_prompts

from pelton import SamplingParams
from pelton.config import EngineConfig
from pelton.model.build import make_build_config
from pelton.model.resolve import resolve_model
from pelton.plugins import load_plugins
from pelton.quantization.interface import LinearShard
from pelton.quantization.plain import decoded_weights
from pelton.testing.models import VOCAB_SIZE, make_tiny_checkpoint
from pelton_plugins.loaders.dummy_loader import DummyLoader, RandomWeight
from pelton_plugins.models.gpt_oss import decode_mxfp4
from pelton_plugins.quantization import bitsandbytes, grouped

KEPT = ["lm_head"]


def compressed(form: str, inputs: dict[str, Any] | None = None, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"symmetric": True, **weights}, "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "format": form, "ignore": KEPT, "config_groups": {"group_0": group}}


def gptq(**settings: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False, **settings}


def bnb(**settings: Any) -> dict[str, Any]:
    return {"quant_method": "bitsandbytes", "llm_int8_skip_modules": KEPT, **settings}


def both_integers() -> dict[str, Any]:
    """Attention in 8 bits of int8, the others in packed 4."""
    packed = compressed("pack-quantized", type="int", num_bits=4, strategy="group", group_size=32)
    (own,) = compressed("int-quantized", type="int", num_bits=8, strategy="channel")["config_groups"].values()
    own |= {"targets": ["re:.*self_attn.*"], "format": "int-quantized"}
    return packed | {"config_groups": packed["config_groups"] | {"group_1": own}}


E4M3_TOKEN = {"type": "float", "num_bits": 8, "symmetric": True, "strategy": "token", "dynamic": True}
E4M3_TENSOR = {"type": "float", "num_bits": 8, "symmetric": True, "strategy": "tensor", "dynamic": False}
QUARK = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False}
FP4 = {"type": "float", "num_bits": 4, "group_size": 16, "strategy": "tensor_group"}
DENSE: dict[str, dict[str, Any]] = {
    "auto-round-gptq": {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True},
    "auto-round-awq": {
        "quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": False, "packing_format": "auto_round:auto_awq",
    },
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True},
    "bnb-fp4-double": bnb(load_in_4bit=True, bnb_4bit_quant_type="fp4", bnb_4bit_use_double_quant=True),
    "bnb-int8": bnb(load_in_8bit=True),
    "bnb-nf4": bnb(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    "fbgemm": {"quant_method": "fbgemm_fp8", "activation_scale_ub": 2.0, "modules_to_not_convert": KEPT},
    "fp8-blocks": {"quant_method": "fp8", "weight_block_size": [32, 32], "modules_to_not_convert": KEPT},
    "fp8-static": {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": KEPT},
    "gptq": gptq(),
    "gptq-8": gptq(bits=8, group_size=-1, checkpoint_format="gptq_v2"),
    "gptq-8-zeros-head": gptq(bits=8, sym=False, lm_head=True),
    "gptq-dynamic": gptq(dynamic={"+:.*mlp.*": {"bits": 8}, "-:.*o_proj.*": {}}),
    "gptq-ordered": gptq(desc_act=True, sym=False),
    "int8": compressed("int-quantized", type="int", num_bits=8, strategy="channel"),
    "int8-and-packed": both_integers(),
    "int8-zeros": compressed("int-quantized", type="int", num_bits=8, strategy="tensor", symmetric=False),
    "modelopt-fp8": {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": KEPT},
    "mxfp4": compressed("mxfp4-pack-quantized", **FP4 | {"group_size": 32, "strategy": "group"}),
    "nvfp4": compressed("nvfp4-pack-quantized", **FP4),
    "nvfp4-modelopt": {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": KEPT},
    "packed": compressed("pack-quantized", type="int", num_bits=4, strategy="group", group_size=32),
    "packed-8": compressed("pack-quantized", type="int", num_bits=8, strategy="channel"),
    "packed-ordered": compressed(
        "pack-quantized", type="int", num_bits=4, strategy="group", group_size=32, symmetric=False, actorder="group"
    ),
    "quark": {"quant_method": "quark", "global_quant_config": {"weight": QUARK, "input_tensors": QUARK}, "exclude": KEPT},
    "row-fp8": compressed("float-quantized", E4M3_TOKEN, type="float", num_bits=8, strategy="channel"),
    "tensor-fp8": compressed("float-quantized", E4M3_TENSOR, type="float", num_bits=8, strategy="tensor"),
    "block-fp8": compressed(
        "float-quantized", E4M3_TOKEN, type="float", num_bits=8, strategy="block", block_structure=[32, 32]
    ),
}  # fmt: skip
OF_EXPERTS = [
    "awq", "bnb-int8", "bnb-nf4", "gptq", "gptq-ordered", "int8", "int8-zeros", "mxfp4", "nvfp4", "nvfp4-modelopt", "packed", "packed-8",
    "row-fp8", "tensor-fp8", "block-fp8", "fp8-blocks", "modelopt-fp8",
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @functools.cache
    def make(family: str) -> Path:
        path, fields = tmp_path_factory.mktemp("dummy") / family, {}
        if family == "qwen3_moe":
            fields = {"moe_intermediate_size": 64}
        sizes = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32, "num_hidden_layers": 2}
        make_tiny_checkpoint(path, family, with_tokenizer=False, **{**sizes, **fields})
        (path / "model.safetensors").unlink()
        return path

    return make


def check(path: Path, settings: dict[str, Any] | None, **more: Any) -> None:
    """The answers are finite and follow the prompt."""
    if settings is not None:
        more["hf_overrides"] = {"quantization_config": settings}
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=2)
    prompts = [{"prompt_token_ids": ids} for ids in make_prompts(VOCAB_SIZE, (1, 17))]
    with make_llm(str(path), load_format="dummy", **more) as llm:
        found = [one.outputs[0] for one in llm.generate(prompts, params, use_tqdm=False)]
    values = [[entry.logprob for step in one.logprobs for entry in step.values()] for one in found]
    assert all(map(math.isfinite, values[0] + values[1])) and values[0] != values[1]


@pytest.mark.parametrize("form", DENSE)
def test_every_form_starts(form: str, folder: Any) -> None:
    check(folder("llama"), DENSE[form])


@pytest.mark.parametrize(
    "form", ["awq", "bnb-nf4", "bnb-fp4-double", "gptq-8-zeros-head", "gptq-ordered", "int8-zeros", "packed-ordered"]
)
def test_forms_start_as_gpus_keep_them(form: str, folder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bitsandbytes, "is_for_cpu", lambda config: False)
    monkeypatch.setattr(grouped, "_Blocks", grouped._Groups)
    monkeypatch.setattr(grouped, "_Dequantized", grouped._Groups)
    check(folder("llama"), DENSE[form])


@pytest.mark.parametrize("form", OF_EXPERTS)
def test_experts_of_every_form_start(form: str, folder: Any) -> None:
    check(folder("qwen3_moe"), DENSE[form])


@pytest.mark.gpu
@pytest.mark.parametrize(
    "family, form", [("llama", form) for form in DENSE] + [("qwen3_moe", form) for form in OF_EXPERTS]
)
def test_a_gpu_draws_every_form(family: str, form: str, folder: Any) -> None:
    check(folder(family), DENSE[form], device="cuda", dtype="bfloat16")


def test_experts_of_gpt_oss_start(folder: Any) -> None:
    check(folder("gpt_oss"), {"quant_method": "mxfp4"})


@pytest.mark.parametrize("method", ["fp8", "q8_0", "q4_0", "q4_1"])
def test_methods_that_round_while_they_load_start(method: str, folder: Any) -> None:
    check(folder("llama"), None, quantization=method)


@pytest.mark.parametrize("form", [form for form in DENSE if form != "bnb-nf4"])
def test_weights_are_as_large_as_those_of_other_models(form: str, folder: Any) -> None:
    config = EngineConfig.from_flat(
        model=str(folder("llama")),
        load_format="dummy",
        dtype="float32",
        hf_overrides={"quantization_config": DENSE[form]},
    )
    plugins = load_plugins(only=[])
    model = resolve_model(config, plugins)
    cpu = torch.device("cpu")
    build = make_build_config(config, model, plugins, device=cpu, max_num_seqs=4, max_num_batched_tokens=64)
    method, target = decoded_weights(build), torch.zeros(256, 128)
    assert method is not None
    method.expect(build, LinearShard("model.layers.0.mlp.up_proj", 256, 128, (0, 256), (0, 128)), target)
    loader = DummyLoader(config, model)
    loader.expect(build.weights.expected())
    build.weights.load(loader.weights())
    assert 0.01 < target.std() < 0.03 and target.mean().abs() < 0.002
    assert len(target.unique(dim=0)) == 256


def test_experts_in_mxfp4_have_codes_and_exponents() -> None:
    blocks, scales = (
        RandomWeight(f"a.down_proj_{name}", shape, torch.bfloat16, 0).read()
        for name, shape in (("blocks", (64, 4, 16)), ("scales", (64, 4)))
    )
    assert blocks.dtype == scales.dtype == torch.uint8
    assert 0.005 < decode_mxfp4(blocks, scales, torch.float32).std() < 0.02
