"""Layers over checkpoints with several matrices in one tensor, and layers without a norm before them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pelton.layers.attention import AttentionLayer
from pelton.layers.decoder import Decoder
from pelton.layers.embedding import LMHead, VocabEmbedding
from pelton.layers.linear import MergedGateUp, QKVLinear, RowParallelLinear
from pelton.layers.norm import RMSNorm
from pelton.layers.rope import get_rope
from pelton.model.weights import WeightMap
from pelton.parallel.context import ParallelContext
from pelton.testing.model import random_weights
from pelton.testing.model_driver import ModelDriver, make_test_build
from pelton.testing.models import load_reference, reference_logits
from pelton.testing.plugins import plugins_of
from pelton_plugins.models import plugin as models_plugin

SIZE, HEADS, KV_HEADS, HEAD_DIM, INNER = 32, 4, 2, 8, 48


class Phi3Layer(nn.Module):
    """As Llama's, with `qkv_proj` and `gate_up_proj` as the checkpoint has them."""

    def __init__(self, *, config, prefix):
        super().__init__()
        hf, attention, mlp = config.hf, f"{prefix}.self_attn", f"{prefix}.mlp"
        heads, head_dim = hf.num_attention_heads, hf.hidden_size // hf.num_attention_heads
        self.first = RMSNorm(hf.hidden_size, config=config, prefix=f"{prefix}.input_layernorm")
        self.qkv = QKVLinear(
            hf.hidden_size, heads, hf.num_key_value_heads, head_dim, norm=self.first, config=config, prefix=attention,
            merged="qkv_proj",
        )  # fmt: skip
        self.attn = AttentionLayer(
            self.qkv.num_heads, self.qkv.num_kv_heads, head_dim, rope=get_rope(config, head_dim), config=config,
            prefix=f"{attention}.attn",
        )  # fmt: skip
        self.o = RowParallelLinear(hf.hidden_size, hf.hidden_size, config=config, prefix=f"{attention}.o_proj")
        self.second = RMSNorm(hf.hidden_size, config=config, prefix=f"{prefix}.post_attention_layernorm")
        self.gate_up = MergedGateUp(
            hf.hidden_size, hf.intermediate_size, activation=hf.hidden_act, norm=self.second, config=config, prefix=mlp,
            merged="gate_up_proj",
        )  # fmt: skip
        self.down = RowParallelLinear(hf.intermediate_size, hf.hidden_size, config=config, prefix=f"{mlp}.down_proj")

    def forward(self, hidden, residual, batch):
        qkv, residual = self.qkv(hidden, residual)
        activated, residual = self.gate_up(self.o(self.attn(qkv, batch)), residual)
        return self.down(activated), residual


class Phi3ForCausalLM(Decoder):
    def __init__(self, *, config, prefix=""):
        super().__init__(config=config)
        hf = config.hf
        self.embed_tokens = VocabEmbedding(hf.vocab_size, hf.hidden_size, config=config, prefix="model.embed_tokens")
        self.layers = nn.ModuleList(
            Phi3Layer(config=config, prefix=f"model.layers.{index}") for index in range(hf.num_hidden_layers)
        )
        self.norm = RMSNorm(hf.hidden_size, config=config, prefix="model.norm")
        self.lm_head = LMHead(norm=self.norm, embedding=self.embed_tokens, config=config)


@pytest.fixture(scope="module")
def phi3(tmp_path_factory):
    from transformers import Phi3Config
    from transformers import Phi3ForCausalLM as Reference

    torch.manual_seed(0)
    config = Phi3Config(
        vocab_size=320, hidden_size=SIZE, intermediate_size=INNER, num_hidden_layers=2, num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS, max_position_embeddings=128, pad_token_id=0, initializer_range=0.2,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("phi3")
    Reference(config).float().save_pretrained(path)
    return path


@pytest.mark.parametrize("size", [1, 2])
def test_a_checkpoint_with_merged_tensors_equals_transformers(phi3, model_plugins, size):
    tokens = list(range(7, 40))
    expected = reference_logits(load_reference(phi3), tokens)
    if size == 1:
        driver = ModelDriver(phi3, plugins=model_plugins, model_class=Phi3ForCausalLM)
        torch.testing.assert_close(driver.step({"a": tokens})["a"], expected, atol=1e-4, rtol=1e-4)
        return
    # Each rank's rows are its share of q, of k and of v, wherever those begin in the tensor.
    ranks = [
        ModelDriver(phi3, plugins=model_plugins, model_class=Phi3ForCausalLM, parallel=ParallelContext(rank, size))
        for rank in range(size)
    ]
    whole = dict(load_reference(phi3).named_parameters())["model.layers.1.self_attn.qkv_proj.weight"]
    parts = whole.split([HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM])
    for rank, driver in enumerate(ranks):
        wanted = torch.cat([part.chunk(size)[rank] for part in parts])
        assert torch.equal(driver.model.layers[1].qkv.weight, wanted)


def test_slices_of_one_tensor_have_to_agree():
    weights, target = WeightMap(), torch.zeros(2, 3)
    weights.expect("m.weight", (4, 3), target, dim=0, start=0, stop=2)
    weights.expect("m.weight", (4, 3), target, dim=0, start=2, stop=4)
    assert weights.expected() == {"m.weight": (4, 3)}
    with pytest.raises(AssertionError, match="two layers read"):
        weights.expect("m.weight", (5, 3), target, dim=0, start=0, stop=2)
    with pytest.raises(AssertionError, match="two layers read"):
        weights.expect("m.weight", (4, 3), target, dim=0, start=0, stop=2, fill=lambda weight, place: None)


def test_layers_without_a_norm_are_the_bare_products():
    build = make_test_build({"rms_norm_eps": 1e-6}, plugins_of(models_plugin), dtype=torch.float32)
    qkv = QKVLinear(SIZE, HEADS, KV_HEADS, HEAD_DIM, norm=None, config=build, prefix="a")
    gate_up = MergedGateUp(SIZE, INNER, activation="silu", norm=None, config=build, prefix="m")
    build.weights.load(random_weights(build.weights.expected()))
    build.ops.weights_loaded()
    weights = {name: weight.read() for name, weight in random_weights(build.weights.expected())}
    x, residual = torch.randn(5, SIZE), torch.randn(5, SIZE)
    found, same = qkv(x, residual)
    wanted = torch.cat([F.linear(x, weights[f"a.{name}_proj.weight"]) for name in "qkv"], dim=1)
    torch.testing.assert_close(found, wanted)
    assert same is residual
    found, same = gate_up(x, None)
    wanted = F.silu(F.linear(x, weights["m.gate_proj.weight"])) * F.linear(x, weights["m.up_proj.weight"])
    torch.testing.assert_close(found, wanted)
    assert same is None
