"""The work of a token, counted from a model's modules."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pelton_e2e import make_llm

from pelton.testing.models import make_tiny_checkpoint


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_moe"])
def test_work_follows_from_the_shapes(tmp_path, family):
    path = make_tiny_checkpoint(tmp_path / family, family)
    hf = json.loads((Path(path) / "config.json").read_text())
    hf = hf.get("text_config", hf)
    hidden, layers, heads = hf["hidden_size"], hf["num_hidden_layers"], hf["num_attention_heads"]
    kv_heads, head_dim = hf["num_key_value_heads"], hf.get("head_dim") or hidden // heads
    attention = hidden * head_dim * (heads + 2 * kv_heads) + heads * head_dim * hidden
    mlp = 3 * hidden * hf["intermediate_size"]
    if family == "qwen3_moe":
        mlp = hf["num_experts_per_tok"] * 3 * hidden * hf["moe_intermediate_size"]
    with make_llm(str(path)) as llm:
        work = llm.llm_engine.info.report.work
    assert work["token_flops"] == 2 * layers * (attention + mlp)
    assert work["output_flops"] == pytest.approx(2 * hidden * hf["vocab_size"], rel=0.01)
    per_layer = 4 * heads * head_dim
    context = {name: value for name, value in work.items() if name.startswith("context_flops")}
    assert sum(context.values()) == layers * per_layer
    assert (len(context) > 1) == (family == "gemma3"), "windows by themselves"
    kv_bytes = sum(value for name, value in work.items() if name.startswith("context_bytes"))
    assert kv_bytes == layers * 2 * kv_heads * head_dim * 4


def test_sparse_layers_read_no_more_of_a_context_than_is_chosen(tmp_path):
    path = make_tiny_checkpoint(tmp_path, "deepseek_v32")
    hf = json.loads((Path(path) / "config.json").read_text())
    with make_llm(str(path)) as llm:
        work = llm.llm_engine.info.report.work
    layers, latent = hf["num_hidden_layers"], hf["kv_lora_rank"] + hf["qk_rope_head_dim"]
    index = hf["index_n_heads"] * hf["index_head_dim"]
    found = {name: value for name, value in work.items() if name.startswith("context_")}
    assert found == {
        "context_flops 0": layers * 4 * index,
        "context_bytes 0": layers * 4 * hf["index_head_dim"],
        f"context_flops {hf['index_topk']}": layers * 4 * hf["num_attention_heads"] * latent,
        f"context_bytes {hf['index_topk']}": layers * 4 * latent,
    }
