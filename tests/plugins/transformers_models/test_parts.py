"""What is replaced by Pelton's modules, and what stays: found by trying modules, not by their names."""

import pytest
import torch
import transformers
from pelton_transformers import make_checkpoint
from torch import nn

import pelton_backends.sdpa.plugin
import pelton_plugins.transformers_models.plugin
from pelton.testing.model_driver import ModelDriver
from pelton.testing.plugins import plugins_of
from pelton_platforms.device.warm_up import few_layers
from pelton_plugins.transformers_models import experts
from pelton_plugins.transformers_models.attention import TorchCalls, without_lists
from pelton_plugins.transformers_models.norms import Norm, find_norm
from pelton_plugins.transformers_models.parts import FusedAttention, GatedMLP
from pelton_plugins.transformers_models.products import (
    Products,
    TiedHead,
    TokenEmbedding,
    embedding_scale,
    is_linear,
)


class Llama(nn.Module):
    """An RMS norm; the other classes differ from it in one thing."""

    def __init__(self):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(32)), 1e-5

    def normed(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x):
        return self.normed(x) * self.weight


class Gemma(Llama):
    def forward(self, x):
        return self.normed(x) * (1 + self.weight)


class Centred(Llama):
    def forward(self, x):
        return self.normed(x - x.mean(-1, keepdim=True)) * self.weight


class OtherEps(Llama):
    def normed(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 2 * self.eps)


class Clipped(Llama):
    def normed(self, x):
        return super().normed(x.clamp(-50.0, 50.0))


class Biased(Llama):
    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.ones(32))


@pytest.mark.parametrize("module, unit_offset", [(Llama(), False), (Gemma(), True)])
def test_rms_norms_are_found(module, unit_offset):
    spec = find_norm(module)
    assert (spec.size, spec.eps, spec.unit_offset) == (32, 1e-5, unit_offset)
    assert torch.equal(module.weight, torch.ones(32))  # tried with other weights, which are gone


@pytest.mark.parametrize("module", [Centred(), OtherEps(), Clipped(), Biased(), nn.LayerNorm(32), nn.Linear(32, 32)])
def test_other_modules_are_not_taken_for_rms_norms(module):
    assert find_norm(module) is None


class OtherWay(nn.Linear):
    def forward(self, x):
        return x @ self.weight.T + self.bias


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class ClippedInput(nn.Linear):
    def forward(self, x):
        return super().forward(x.clamp(-50.0, 50.0))


class BoundedByBuffers(nn.Linear):
    """Its bounds come with the weights, after it was tried."""

    def __init__(self, *args):
        super().__init__(*args)
        self.register_buffer("bound", torch.tensor(float("inf")))

    def forward(self, x):
        return super().forward(x.clamp(-self.bound, self.bound))


class Scaled(nn.Embedding):
    def forward(self, ids):
        return super().forward(ids) * 8.0


class Normed(nn.Embedding):
    def forward(self, ids):
        return torch.nn.functional.normalize(super().forward(ids), dim=-1)


def test_products_and_embeddings_are_found():
    assert is_linear(nn.Linear(4, 4)) and is_linear(OtherWay(4, 4)) and not is_linear(Doubled(4, 4))
    assert not any(is_linear(one) for one in (nn.LayerNorm(4), ClippedInput(4, 4), BoundedByBuffers(4, 4)))
    assert [embedding_scale(kind(4, 6)) for kind in (nn.Embedding, Scaled, Normed)] == [1.0, 8.0, None]
    assert embedding_scale(nn.Linear(4, 6)) is None


def build(path):
    return ModelDriver(
        path, plugins=plugins_of(pelton_backends.sdpa.plugin, pelton_plugins.transformers_models.plugin)
    ).model


def sizes(model):
    return sorted({tuple(one.sizes) for one in model.modules() if isinstance(one, Products)})


def test_products_of_one_input_are_one_product(tmp_path):
    """Query, key and value; gate and up. The head stands alone."""
    model = build(make_checkpoint(tmp_path, "ernie4_5", tie_word_embeddings=False))
    assert sizes(model) == [(64,), (64, 32, 32), (96, 96), (320,)]
    assert sum(isinstance(one, Norm) for one in model.modules()) == 7
    assert not any(isinstance(one, nn.Linear) for one in model.modules())


@pytest.mark.parametrize(
    "model_type, num_attention, num_gated",
    [
        ("qwen3", 3, 3),  # norms of queries and keys
        ("phi3", 3, 3),  # query, key and value are one matrix, gate and up another; a part of each head turns
        ("smollm3", 4, 4),  # its last layer turns nothing
        ("gemma2", 4, 4),
        ("cohere2", 1, 4),  # pairs lie beside each other in the layers that turn
        ("olmo2", 0, 3),  # norms of all heads together
        ("gpt_neox", 0, 0),  # a head's query, key and value lie together
        ("mixtral", 3, 0),  # experts
    ],
)
def test_attention_and_gated_mlps_are_found(tmp_path, model_type, num_attention, num_gated):
    model = build(make_checkpoint(tmp_path, model_type))
    assert sum(isinstance(one, FusedAttention) for one in model.modules()) == num_attention
    assert sum(isinstance(one, GatedMLP) for one in model.modules()) == num_gated


def tampered(monkeypatch, name, method, change):
    """transformers' Qwen3 with one method of a class changed."""
    from transformers.models.qwen3 import modeling_qwen3

    kind = getattr(modeling_qwen3, name)
    plain = getattr(kind, method)
    monkeypatch.setattr(kind, method, lambda *args, **kwargs: change(plain, *args, **kwargs))


def scaled_output(plain, *args, **kwargs):
    output, weights = plain(*args, **kwargs)
    return 2.0 * output, weights


def other_cosines(plain, self, *args, position_embeddings, **kwargs):
    cos, sin = position_embeddings
    return plain(self, *args, position_embeddings=(1.5 * cos, sin), **kwargs)


def negated_up(plain, self, x):
    return self.down_proj(self.act_fn(self.gate_proj(x)) * -self.up_proj(x))


def clipped_up(plain, self, x):
    return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x).clamp(-30.0, 30.0))


def written_up(plain, self, x):
    return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x).mul_(2.0))


def written_output(plain, *args, **kwargs):
    output, weights = plain(*args, **kwargs)
    return output.mul_(2.0), weights


def other_input(plain, self, x):
    return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x + 0.0))


@pytest.mark.parametrize(
    "name, change, attention_stays",
    [
        ("Qwen3Attention", scaled_output, True),
        ("Qwen3Attention", other_cosines, True),
        ("Qwen3MLP", negated_up, False),
        ("Qwen3MLP", other_input, False),
        ("Qwen3MLP", clipped_up, False),
        ("Qwen3MLP", written_up, False),
        ("Qwen3Attention", written_output, True),
    ],
)
def test_modules_that_compute_anything_else_stay(tmp_path, monkeypatch, name, change, attention_stays):
    tampered(monkeypatch, name, "forward", change)
    model = build(make_checkpoint(tmp_path, "qwen3"))
    kept, other = (FusedAttention, GatedMLP) if attention_stays else (GatedMLP, FusedAttention)
    assert not any(isinstance(one, kept) for one in model.modules())
    assert sum(isinstance(one, other) for one in model.modules()) == 3


def test_a_tied_head_reads_the_embedding(tmp_path):
    model = build(make_checkpoint(tmp_path, "cohere"))
    [head] = [one for one in model.modules() if isinstance(one, TiedHead)]
    [embedding] = [one for one in model.modules() if isinstance(one, TokenEmbedding)]
    assert head is not embedding and sizes(model) == [(64,), (64, 32, 32), (96, 96)]
    assert sum(one.numel() == 320 * 64 for one in model.parameters()) == 1


def test_warm_up_steps_go_through_few_layers(tmp_path):
    model = build(make_checkpoint(tmp_path, "qwen3"))
    whole = model.layers
    with few_layers(model):
        assert len(model.layers) == len(model.body.layers) == 2
    assert model.layers is whole and len(whole) == 3 and "layers" not in model._modules


def test_experts_are_gathered_where_a_graph_needs_it_and_they_are_small(tmp_path, monkeypatch):
    """transformers' grouped product asks the device for the sizes of the groups, but for bfloat16."""
    model = build(make_checkpoint(tmp_path, "mixtral"))
    module = model.get_submodule("body.layers.0.mlp.experts")
    hidden, index = torch.randn(5, 64), torch.randint(0, 4, (5, 2))
    weights = torch.rand(5, 2)
    grouped = experts.experts(module, hidden, index, weights)
    assert not experts.is_gathered(module, hidden, index)
    monkeypatch.setattr(experts, "is_gathered", lambda *given: True)
    torch.testing.assert_close(experts.experts(module, hidden, index, weights), grouped, atol=1e-3, rtol=1e-4)
    monkeypatch.undo()

    class OnDevice:
        is_cuda, dtype = True, torch.float32

    assert experts.is_gathered(module, OnDevice(), index)
    monkeypatch.setattr(experts, "MOST_GATHERED_BYTES", 10 * (3 * 48 * 64 * 4) - 1)
    assert not experts.is_gathered(module, OnDevice(), index)
    OnDevice.dtype = torch.bfloat16
    assert not experts.is_gathered(module, OnDevice(), index[:1])


@pytest.mark.parametrize(
    "index",
    [
        (..., [-1], slice(None)),
        (slice(None), slice(0, 2), [-2]),
        ([1],),
        (None, [2], ...),
        (slice(None), [0, 1]),
        2,
        [0],
    ],
    ids=str,
)
def test_lists_of_one_number_index_as_slices(index):
    x = torch.arange(60).view(3, 4, 5)
    found = without_lists(index)
    assert torch.equal(x[found], x[index])
    assert (
        not isinstance(index, tuple)
        or index == (slice(None), [0, 1])
        or not any(isinstance(one, list) for one in found)
    )


class Attended:
    """A `Receiver` of full attention."""

    def attend(self, module, query, key, value, mask, options):
        assert query.shape[2] == key.shape[2] and query.shape[1] == key.shape[1]
        return nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2)


@pytest.mark.parametrize("num_tokens", [1, 4])
def test_heads_that_share_a_key_are_heads_even_where_they_lie_as_tokens(num_tokens):
    """transformers' function for torch's attention puts them there in steps of one token."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    module = nn.Module()
    module.num_key_value_groups, module.is_causal = 3, True
    query, key, value = (torch.randn(1, heads, num_tokens, 8) for heads in (6, 2, 2))
    mask = torch.ones(1, 1, num_tokens, num_tokens, dtype=torch.bool).tril()
    expected, _ = sdpa_attention_forward(module, query, key, value, mask)
    with TorchCalls(Attended(), lambda: module):
        got, _ = sdpa_attention_forward(module, query, key, value, mask)
    torch.testing.assert_close(got, expected)


def test_norms_that_are_not_rms_norms_stay(tmp_path):
    model = build(make_checkpoint(tmp_path, "stablelm"))
    assert sum(isinstance(one, nn.LayerNorm) for one in model.modules()) == 7
    assert not any(isinstance(one, Norm) for one in model.modules())


def test_a_window_is_read_from_the_mask_of_each_layer(tmp_path):
    driver = ModelDriver(
        make_checkpoint(tmp_path, "gemma2"),
        plugins=plugins_of(pelton_backends.sdpa.plugin, pelton_plugins.transformers_models.plugin),
    )
    layers = list(driver.build.cache_layers.values())
    assert [layer.sliding_window for layer in layers] == [24, None, 24, None]
    assert {layer.soft_cap for layer in layers} == {50.0} and {layer.scale for layer in layers} == {24**-0.5}


@pytest.mark.parametrize("max_model_len", [64, 512])
def test_long_rope_takes_the_frequencies_of_the_longest_row(tmp_path, max_model_len):
    """transformers chooses by the longest row of each step, so that what others ask for would change a row's answer."""
    rope = {
        "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8,
        "original_max_position_embeddings": 64, "factor": 8.0,
    }  # fmt: skip
    path = make_checkpoint(
        tmp_path, "phi3", rope_parameters=rope, original_max_position_embeddings=64, partial_rotary_factor=1.0
    )
    reference = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    ids = torch.randint(5, 320, (max_model_len // 2,), generator=torch.Generator().manual_seed(0))
    driver = ModelDriver(
        path, max_model_len=max_model_len,
        plugins=plugins_of(pelton_backends.sdpa.plugin, pelton_plugins.transformers_models.plugin),
    )  # fmt: skip
    got = torch.cat([driver.step({"a": part})["a"] for part in (ids[:20].tolist(), ids[20:].tolist())])
    with torch.inference_mode():
        want = reference(ids[None], use_cache=False).logits[0]
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
