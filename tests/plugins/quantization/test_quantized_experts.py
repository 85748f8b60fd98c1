"""Experts in integers of checkpoints, packed as on GPUs, in blocks as on CPUs, and decoded: the ids of transformers in float32 whose
experts are what the numbers say, token for token: batched, alone, in chunks, with hits of the prefix cache, after preemption."""

import json
import shutil

import pytest
import transformers
from pelton_e2e import generate, greedy, greedy_reference, make_llm, make_prompts
from pelton_grouped import (
    Form,
    bitsandbytes_tensors,
    grouped_tensors,
    int_quantized_tensors,
    nf4_tensors,
)
from safetensors.torch import load_file, save_file

from pelton.errors import ConfigError
from pelton.ops.packed_blocks import KINDS
from pelton.testing.models import VOCAB_SIZE, make_tiny_checkpoint
from pelton_plugins.models import experts
from pelton_plugins.quantization.numbers import round_rows, row_scales
from pelton_plugins.weight_forms.block_writing import quantize as to_blocks
from pelton_plugins.weight_forms.blocks import split_blocks

pytestmark = pytest.mark.usefixtures("forks")
NUM_TOKENS = 10
LENGTHS = (1, 17, 40)
SIZES = {"hidden_size": 64, "moe_intermediate_size": 32, "intermediate_size": 96}
KEPT = [
    "self_attn",
    "lm_head",
    "shared_experts",
    "layers.0.mlp.gate_proj",
    "layers.0.mlp.up_proj",
    "layers.0.mlp.down_proj",
]
IGNORED = [f"re:.*{name}.*" for name in ("self_attn", "lm_head", "shared_experts", r"layers.0.mlp.(gate|up|down)_proj")]


BITSANDBYTES = {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_skip_modules": KEPT}
INT8 = {
    "quant_method": "compressed-tensors", "format": "int-quantized", "ignore": IGNORED,
    "config_groups": {
        "group_0": {
            "targets": ["Linear"], "weights": {"type": "int", "num_bits": 8, "strategy": "channel", "symmetric": True},
        },
    },
}  # fmt: skip
KEPT_GPTQ = {"modules_to_not_convert": KEPT}
FORMS = {
    "awq": Form("awq", settings=KEPT_GPTQ),
    "gptq": Form("gptq", is_symmetric=True, settings=KEPT_GPTQ),
    "gptq-8-whole": Form("gptq", 8, -1, is_symmetric=True, settings=KEPT_GPTQ),
    "gptq-ordered": Form("gptq", is_ordered=True, settings=KEPT_GPTQ),
    "packed": Form("compressed-tensors", is_symmetric=True, settings={"ignore": IGNORED}),
    "packed-zeros": Form("compressed-tensors", settings={"ignore": IGNORED}),
    "packed-8-channel": Form("compressed-tensors", 8, -1, is_symmetric=True, settings={"ignore": IGNORED}),
}
CASES = {name: (form.config, grouped_tensors(form)) for name, form in FORMS.items()} | {
    "bitsandbytes-int8": (BITSANDBYTES, bitsandbytes_tensors), "int-quantized": (INT8, int_quantized_tensors),
}  # fmt: skip
WEIGHT_FORMATS = {
    "awq": ("int4_grouped", 32), "gptq": ("int4_grouped", 32), "gptq-8-whole": ("int8_grouped", None), "gptq-ordered": ("plain", None),
    "packed": ("int4_grouped", 32), "packed-zeros": ("int4_grouped", 32), "packed-8-channel": ("int8_grouped", None),
    "bitsandbytes-int8": ("int8_grouped", None), "int-quantized": ("int8_grouped", None),
}  # fmt: skip

BLOCKS = {
    case: ("plain", None) if case == "gptq-ordered" else ("q8_0" if bits == "int8_grouped" else "q4_0", None)
    for case, (bits, _) in WEIGHT_FORMATS.items()
} | {"awq": ("q4_1", None), "packed-zeros": ("q4_1", None)}


_written = {}


def write_both(folder, family, settings, make, **sizes):
    """The checkpoint whose experts are quantized, and one that has what they say: in the folder of the first test that asks for them."""
    key = make, repr((family, settings, sizes))
    if key not in _written:
        _written[key] = _write_both(folder, family, settings, make, **sizes)
    return _written[key]


def _write_both(folder, family, settings, make, **sizes):
    plain, packed = folder / "plain", folder / "packed"
    make_tiny_checkpoint(plain, family, with_tokenizer=False, **(SIZES | sizes))
    shutil.copytree(plain, packed)
    tensors = load_file(plain / "model.safetensors")
    small = dict(tensors)
    for name in [name for name in tensors if ".experts." in name]:
        found, said = make(name.removesuffix(".weight"), small.pop(name).float())
        small |= {key: part.contiguous() for key, part in found.items()}
        tensors[name] = said.contiguous()
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    save_file(small, packed / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((packed / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    return str(plain), str(packed)


@pytest.fixture
def forms(monkeypatch):
    """The forms in which layers keep their experts."""
    found, choose = [], experts._form
    monkeypatch.setattr(experts, "_form", lambda *args: found.append(choose(*args)) or found[-1])
    return found


@pytest.mark.parametrize("way", ["decoded", "packed", "blocks"])
@pytest.mark.parametrize("case", CASES)
def test_ids_are_those_of_transformers_with_the_dequantized_experts(case, way, forms, tmp_path, monkeypatch):
    """In chunks; together, alone, and once more with the cached prompts."""
    if way == "packed":
        monkeypatch.setattr(experts, "keeps_packed", lambda config: True)
    elif way == "decoded":
        monkeypatch.setattr(experts, "keeps_blocks", lambda config: False)
    plain, packed = write_both(tmp_path, "qwen3_moe", *CASES[case])
    prompts = make_prompts(VOCAB_SIZE, LENGTHS)
    want, gap = greedy_reference(plain, prompts, NUM_TOKENS)
    assert gap > 1e-4
    with make_llm(packed, max_num_batched_tokens=32) as llm:
        assert generate(llm, prompts, greedy(NUM_TOKENS)) == want
        assert [generate(llm, [prompt], greedy(NUM_TOKENS))[0] for prompt in prompts] == want
    assert set(forms) == {{"packed": WEIGHT_FORMATS[case], "blocks": BLOCKS[case], "decoded": ("plain", None)}[way]}


@pytest.mark.parametrize("case", ["awq", "bitsandbytes-int8"])
def test_experts_in_blocks_after_preemption(case, forms, tmp_path):
    plain, packed = write_both(tmp_path, "qwen3_moe", *CASES[case])
    prompts = make_prompts(VOCAB_SIZE, LENGTHS)
    want, _ = greedy_reference(plain, prompts, NUM_TOKENS)
    with make_llm(packed, num_gpu_blocks_override=7, max_model_len=64) as llm:
        assert generate(llm, prompts, greedy(NUM_TOKENS)) == want
        assert llm.num_preemptions() > 0
    assert set(forms) == {BLOCKS[case]}


@pytest.mark.parametrize("in_blocks", [False, True], ids=["packed", "blocks"])
@pytest.mark.parametrize(
    "family, case", [("mixtral", "awq"), ("deepseek_v3_moe", "packed-zeros"), ("glm4_moe", "gptq")]
)
def test_other_families(family, case, in_blocks, forms, tmp_path, monkeypatch):
    """Blocks keep minus scale times zero point in float16: theirs is a form without zero points."""
    if in_blocks:
        case = {"awq": "gptq", "packed-zeros": "packed"}.get(case, case)
    else:
        monkeypatch.setattr(experts, "keeps_packed", lambda config: True)
    plain, packed = write_both(tmp_path, family, *CASES[case])
    prompts = make_prompts(VOCAB_SIZE, LENGTHS)
    want, _ = greedy_reference(plain, prompts, NUM_TOKENS)
    with make_llm(packed) as llm:
        assert generate(llm, prompts, greedy(NUM_TOKENS)) == want
    assert set(forms) == {BLOCKS[case] if in_blocks else WEIGHT_FORMATS[case]}


@pytest.mark.parametrize("is_double", [False, True], ids=["single", "double"])
@pytest.mark.parametrize("way", ["packed", "decoded", "cut"])
def test_experts_in_nf4(way, is_double, forms, tmp_path, monkeypatch):
    """Where a row of down is half a block, and on CPUs, they are decoded."""
    if way != "decoded":
        monkeypatch.setattr(experts, "keeps_packed", lambda config: True)
    settings = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "llm_int8_skip_modules": KEPT,
    }
    settings |= {"bnb_4bit_use_double_quant": is_double}

    plain, packed = write_both(
        tmp_path,
        "qwen3_moe",
        settings,
        nf4_tensors(is_double=is_double),
        moe_intermediate_size=32 if way == "cut" else 64,
    )
    prompts = make_prompts(VOCAB_SIZE, LENGTHS)
    want, gap = greedy_reference(plain, prompts, NUM_TOKENS)
    assert gap > 1e-5
    with make_llm(packed, max_num_batched_tokens=32) as llm:
        assert generate(llm, prompts, greedy(NUM_TOKENS)) == want
        assert [generate(llm, [prompt], greedy(NUM_TOKENS))[0] for prompt in prompts] == want
    assert set(forms) == {("nf4", 64) if way == "packed" else ("plain", None)}


@pytest.mark.parametrize("is_whole", [False, True], ids=["shares", "whole"])
def test_ranks_have_their_part_of_packed_experts(is_whole, tmp_path):
    """32 columns of down are one group, and one block: half of them are decoded. Whole experts are in blocks."""
    plain, packed = write_both(tmp_path, "qwen3_moe", *CASES["awq"])
    prompts = make_prompts(VOCAB_SIZE, LENGTHS)
    want, _ = greedy_reference(plain, prompts, NUM_TOKENS)
    with make_llm(packed, tensor_parallel_size=2, enable_expert_parallel=is_whole) as llm:
        assert generate(llm, prompts, greedy(NUM_TOKENS)) == want


def in_blocks(kind):
    def make(module, weight):
        codes, scales, minima = split_blocks(to_blocks(weight, KINDS[kind]), KINDS[kind])
        numbers = codes.float().unflatten(1, (-1, 32)) * scales.float()[..., None] + minima.float()[..., None]
        return {f"{module}.weight": weight}, numbers.flatten(1)

    return make


@pytest.mark.parametrize("way", ["packed", "blocks"])
@pytest.mark.parametrize("kind", ["q8_0", "q4_0", "q4_1"])
def test_experts_are_quantized_while_they_load(kind, way, forms, tmp_path, monkeypatch):
    """Other matrices would be rounded too: here they stay as they are."""
    if way == "packed":
        monkeypatch.setattr(experts, "keeps_packed", lambda config: True)
    monkeypatch.setattr(
        "pelton_plugins.weight_forms.blocks.BlockWeights.create",
        lambda self, config, shards, **more: self.decoded.create(config, shards, **more),
    )
    plain, packed = write_both(tmp_path, "qwen3_moe", {}, in_blocks(kind))
    prompts = make_prompts(VOCAB_SIZE, LENGTHS)
    want, _ = greedy_reference(plain, prompts, NUM_TOKENS)
    with make_llm(packed, quantization=kind) as llm:
        assert generate(llm, prompts, greedy(NUM_TOKENS)) == want
    packed_form = ("int8_minima" if kind == "q8_0" else "int4_minima", 32)
    assert set(forms) == {packed_form if way == "packed" else (kind, None)}


@pytest.mark.parametrize("way", ["packed", "blocks"])
def test_experts_of_one_layer_that_differ_are_an_error(way, tmp_path, monkeypatch):
    if way == "packed":
        monkeypatch.setattr(experts, "keeps_packed", lambda config: True)
    settings, make = CASES["awq"]
    settings = settings | {"modules_to_not_convert": [*KEPT, "experts.3"]}
    _, packed = write_both(tmp_path, "qwen3_moe", settings, make)
    with pytest.raises(ConfigError, match=r"experts\.3\.\w+ is not quantized, though other experts of its layer are"):
        make_llm(packed)


def write_llama4_in_fp8(folder, down_scale):
    """FBGEMM's form as transformers writes it: a tensor a matrix [E, in, out], with scales [E, 1, out], of down [E, out, 1]."""
    plain, packed = folder / "plain", folder / "packed"
    make_tiny_checkpoint(plain, "llama4", with_tokenizer=False)
    shutil.copytree(plain, packed)
    tensors = load_file(plain / "model.safetensors")
    small = dict(tensors)
    for name in [name for name in tensors if ".experts." in name]:
        rows = tensors[name].transpose(1, 2).float()
        scale = row_scales(rows.flatten(0, 1)).view(*rows.shape[:2], 1)
        numbers = round_rows(rows.flatten(0, 1), scale.flatten()).view(rows.shape)
        tensors[name] = (numbers.float() * scale).transpose(1, 2).contiguous()
        small[name] = numbers.transpose(1, 2).contiguous()
        small[f"{name}_scale"] = (
            scale if name.endswith("down_proj") and down_scale == "rows" else scale.transpose(1, 2)
        ).contiguous()
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    save_file(small, packed / "model.safetensors", metadata={"format": "pt"})
    kept = [
        "self_attn",
        "lm_head",
        "feed_forward.gate_proj",
        "feed_forward.up_proj",
        "feed_forward.down_proj",
        "shared_expert",
    ]
    settings = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": kept}
    config = json.loads((packed / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    return str(plain), str(packed)


@pytest.mark.parametrize("is_kept, down_scale", [(False, "rows"), (True, "rows"), (True, "columns")])
def test_stacked_experts_in_fp8(is_kept, down_scale, forms, tmp_path, monkeypatch):
    if is_kept:
        monkeypatch.setattr(experts, "keeps_packed", lambda config: True)
    plain, packed = write_llama4_in_fp8(tmp_path, down_scale)
    prompts = make_prompts(VOCAB_SIZE, LENGTHS)
    want, _ = greedy_reference(plain, prompts, NUM_TOKENS)
    with make_llm(packed) as llm:
        assert generate(llm, prompts, greedy(NUM_TOKENS)) == want
    assert set(forms) == {("e4m3", None) if is_kept else ("plain", None)}


PHIMOE = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64}
GRANITE = {
    "layer_types": ["linear_attention", "full_attention"] * 2, "num_local_experts": 4, "num_experts_per_tok": 2, "mamba_n_heads": 8,
    "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 24, "mamba_chunk_size": 32,
}  # fmt: skip
MADE = {"phimoe": ("Phimoe", PHIMOE), "granitemoehybrid": ("GraniteMoeHybrid", GRANITE)}


def write_rows_in_fp8(folder, family, *, with_experts):
    """In compressed-tensors' form; experts that are one tensor a matrix stay as they are."""
    kind, fields = MADE.get(family, (None, {}))
    if kind:
        fields |= {
            "config_class": getattr(transformers, f"{kind}Config"),
            "model_class": getattr(transformers, f"{kind}ForCausalLM"),
        }
    path = make_tiny_checkpoint(folder / family, None if kind else family, with_tokenizer=False, **fields)
    tensors = load_file(path / "model.safetensors")
    for name in [name for name in tensors if name.endswith(".weight") and tensors[name].dim() == 2]:
        if ".experts." in name if with_experts else "_proj." in name or "_linear." in name:
            scales = row_scales(tensors[name])
            tensors |= {name: round_rows(tensors[name], scales), f"{name}_scale": scales.unsqueeze(-1)}
    save_file(tensors, path / "model.safetensors")
    group = {"targets": ["Linear"], "weights": {"type": "float", "num_bits": 8, "strategy": "channel"}}
    settings = {
        "quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*self_attn.*"] if with_experts else ["lm_head"],
    }  # fmt: skip
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return str(path)


@pytest.mark.parametrize("family", ["granitemoehybrid", "llama4"])
def test_plain_stacked_experts_beside_quantized_matrices_are_named(family, tmp_path):
    """What the error says to do works."""
    path = write_rows_in_fp8(tmp_path, family, with_experts=False)
    with pytest.raises(
        ConfigError, match=r"has model\.layers\.\d\.\w+\.experts in float32, not quantized.*Add \"re:\.\*experts"
    ):
        make_llm(path)
    left_out = {"quantization_config": {"ignore": ["lm_head", "re:.*experts.*"]}}
    with make_llm(path, hf_overrides=left_out) as llm:
        assert len(generate(llm, make_prompts(VOCAB_SIZE, LENGTHS), greedy(NUM_TOKENS))) == len(LENGTHS)


def test_quantized_experts_on_the_modules_of_transformers_are_named(tmp_path):
    path = write_rows_in_fp8(tmp_path, "phimoe", with_experts=True)
    with pytest.raises(
        ConfigError,
        match=r"says 'compressed-tensors', .*w1\.weight_scale: model\.layers\.0\.mlp\.experts are quantized",
    ):
        make_llm(path)
    path = write_rows_in_fp8(tmp_path, "mixtral", with_experts=True)
    with pytest.raises(ConfigError, match="leave model_impl unset; else take the checkpoint that is not quantized"):
        make_llm(path, model_impl="transformers")
    with make_llm(path) as llm:
        assert len(generate(llm, make_prompts(VOCAB_SIZE, LENGTHS), greedy(NUM_TOKENS))) == len(LENGTHS)


def test_experts_without_a_gate_are_named_where_no_method_decodes(tmp_path):
    fields = {
        "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 24, "chunk_size": 32, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 64,
        "layers_block_type": ["linear_attention", "full_attention", "moe"],
    }  # fmt: skip
    kinds = {"config_class": transformers.NemotronHConfig, "model_class": transformers.NemotronHForCausalLM}
    path = str(make_tiny_checkpoint(tmp_path / "m", with_tokenizer=False, **kinds, **fields))
    with pytest.raises(ConfigError, match=r"'fp8', and .* has experts without a gate.* Use q8_0 or q4_1"):
        make_llm(path, quantization="fp8")
    for method in ("q8_0", "q4_1"):
        with make_llm(path, quantization=method) as llm:
            assert len(generate(llm, make_prompts(VOCAB_SIZE, LENGTHS), greedy(NUM_TOKENS))) == len(LENGTHS)
