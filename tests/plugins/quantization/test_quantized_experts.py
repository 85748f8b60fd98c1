"""Experts in integers of checkpoints, packed as on GPUs, in blocks as on CPUs, and decoded: the ids of transformers in float32 whose
experts are what the numbers say, token for token: batched, alone, in chunks, with hits of the prefix cache, after preemption."""

import json
import shutil

import pytest
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
