"""Experts of .gguf files, all of a layer in one tensor: the ids of transformers with what the blocks say, packed and decoded."""

import json

import gguf
import numpy as np
import pytest
import torch
from pelton_e2e import generate, greedy, greedy_reference, make_llm, make_prompts
from safetensors.torch import load_file, save_file

from pelton.testing.models import VOCAB_SIZE, make_tiny_checkpoint
from pelton_plugins.models import experts

SIZES = {"hidden_size": 64, "moe_intermediate_size": 32, "head_dim": 32}
NUM_TOKENS = 16
LAYERS, EXPERTS, ROPE_THETA = 3, 8, 10_000.0
PARTS = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm", "mlp.gate": "ffn_gate_inp",
}  # fmt: skip
WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def write_both(folder, kinds):
    """A checkpoint for transformers with what the file's blocks say, and the file; kinds: of gate, up and down."""
    plain = folder / "plain"
    made = {"num_hidden_layers": LAYERS, "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA}}
    config = make_tiny_checkpoint(plain, "qwen3_moe", with_tokenizer=False, **SIZES, **made) / "config.json"
    hf, tensors = json.loads(config.read_text()), load_file(plain / "model.safetensors")
    writer = gguf.GGUFWriter(folder / "m.gguf", "qwen3moe")
    for key, value in {
        "block_count": LAYERS, "context_length": 512, "embedding_length": hf["hidden_size"], "feed_forward_length": hf["intermediate_size"],
        "attention.head_count": hf["num_attention_heads"], "attention.head_count_kv": hf["num_key_value_heads"],
        "attention.key_length": hf["head_dim"], "expert_count": EXPERTS, "expert_used_count": hf["num_experts_per_tok"],
        "expert_feed_forward_length": hf["moe_intermediate_size"],
    }.items():  # fmt: skip
        writer.add_uint32(f"qwen3moe.{key}", value)
    writer.add_float32("qwen3moe.attention.layer_norm_rms_epsilon", hf["rms_norm_eps"])
    writer.add_float32("qwen3moe.rope.freq_base", ROPE_THETA)
    for name, tensor in tensors.items():
        stem = name.removesuffix(".weight")
        if stem in WHOLE:
            writer.add_tensor(f"{WHOLE[stem]}.weight", tensor.float().numpy())
        elif ".experts." not in stem:
            layer, part = stem.removeprefix("model.layers.").split(".", 1)
            writer.add_tensor(f"blk.{layer}.{PARTS[part]}.weight", tensor.float().numpy())
    for layer in range(LAYERS):
        for part, kind in zip(("gate", "up", "down"), kinds, strict=True):
            names = [f"model.layers.{layer}.mlp.experts.{i}.{part}_proj.weight" for i in range(EXPERTS)]
            kind = gguf.GGMLQuantizationType[kind]
            packed = gguf.quantize(np.stack([tensors[name].float().numpy() for name in names]), kind)
            writer.add_tensor(f"blk.{layer}.ffn_{part}_exps.weight", packed, raw_dtype=kind)
            said = torch.from_numpy(gguf.dequantize(packed, kind).copy())
            tensors |= {name: said[i].contiguous() for i, name in enumerate(names)}
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    return str(plain), str(folder / "m.gguf")


@pytest.mark.parametrize("in_blocks", [False, True], ids=["packed", "blocks"])
@pytest.mark.parametrize(
    "kinds, form, blocks",
    [
        (("Q8_0", "Q8_0", "Q8_0"), "int8_minima", "q8_0"), (("Q4_0", "Q4_1", "Q4_0"), "int4_minima", "q4_0+q4_1+q4_0"),
        (("Q4_1", "Q4_1", "Q8_0"), "int8_minima", "q4_1+q4_1+q8_0"), (("F32", "F32", "F32"), "plain", "plain"),
    ],
    ids=str,
)  # fmt: skip
def test_ids_are_those_of_transformers_with_what_the_blocks_say(kinds, form, blocks, in_blocks, tmp_path, monkeypatch):
    if not in_blocks:
        monkeypatch.setattr(experts, "keeps_packed", lambda config: True)
    forms, choose = [], experts._form
    monkeypatch.setattr(experts, "_form", lambda *args: forms.append(choose(*args)) or forms[-1])
    plain, file = write_both(tmp_path, kinds)
    prompts = make_prompts(VOCAB_SIZE, (1, 17, 40))
    want, gap = greedy_reference(plain, prompts, NUM_TOKENS)
    assert gap > 1e-4
    for settings in ({"quantization": "gguf"}, {}):
        with make_llm(file, **settings) as llm:
            assert generate(llm, prompts, greedy(NUM_TOKENS)) == want
    assert {name for name, _ in forms} == {blocks if in_blocks else form, "plain"}
