"""The torch references against plain float64 arithmetic, one token at a time."""

import math

import pytest
import torch

from pelton.builtin import pelton_fused_ops
from pelton.errors import ConfigError
from pelton.ops.interface import (
    AddNormGatedLinearNeeds,
    AddNormGatedLinearTensors,
    AddNormLinearNeeds,
    AddNormLinearTensors,
    AddNormLogitsNeeds,
    AddNormLogitsTensors,
    EmbedNeeds,
    EmbedTensors,
    LinearNeeds,
    LinearSpec,
    LinearWeights,
    NormSpec,
    QkNormRopeWriteKvNeeds,
    QkNormRopeWriteKvTensors,
)
from pelton.ops.reference import rms_norm, rotate, write_kv
from pelton.ops.selector import OpSelector
from pelton.testing.plugins import references
from pelton_backends.reference import linear
from pelton_backends.reference.ops import (
    ReferenceAddNormGatedLinear,
    ReferenceAddNormLinear,
    ReferenceAddNormLogits,
    ReferenceEmbed,
    ReferenceLinear,
    ReferenceQkNormRopeWriteKv,
)

H, OUT = 8, 6


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)


def norm_oracle(row, weight, eps, unit_offset=False):
    rms = math.sqrt(sum(float(x) ** 2 for x in row) / len(row) + eps)
    return [float(x) / rms * (float(w) + unit_offset) for x, w in zip(row, weight, strict=True)]


@pytest.mark.parametrize("unit_offset", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 1, 5])
def test_rms_norm(generator, unit_offset, num_tokens):
    x, weight = torch.randn(num_tokens, H, generator=generator) * 3, torch.randn(H, generator=generator)
    got = rms_norm(x, weight, NormSpec(size=H, eps=1e-3, unit_offset=unit_offset))
    want = torch.tensor([norm_oracle(row, weight, 1e-3, unit_offset) for row in x]).view(num_tokens, H)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_rms_norm_of_bfloat16_is_computed_in_float32(generator):
    x = (torch.randn(3, 512, generator=generator) * 100).bfloat16()
    got = rms_norm(x, torch.ones(512).bfloat16(), NormSpec(size=512, eps=1e-6))
    want = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), want, atol=0, rtol=2**-8)


class Seam:
    """Inputs that the norm seams share."""

    def __init__(self, generator, *, out=OUT, post=False, reduce=None):
        make = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
        self.hidden, self.residual = make(3, H), make(3, H)
        self.norm, self.post_norm = make(H), make(H) if post else None
        self.weight, self.bias = make(out, H), make(out)
        self.spec = NormSpec(size=H, eps=1e-6)
        self.linear = LinearWeights(LinearSpec(in_features=H, out_features=out), {"weight": self.weight}, self.bias)
        self.reduce = reduce

    def oracle(self, residual):
        """(linear(norm(residual')), residual') in float64."""
        hidden = self.hidden.double() if self.reduce is None else self.reduce(self.hidden.double())
        if self.post_norm is not None:
            hidden = torch.tensor([norm_oracle(row, self.post_norm, 1e-6) for row in hidden], dtype=torch.float64)
        total = hidden if residual is None else hidden + residual.double()
        normed = torch.tensor([norm_oracle(row, self.norm, 1e-6) for row in total], dtype=torch.float64)
        return normed @ self.weight.double().T + self.bias.double(), total


@pytest.mark.parametrize("post", [False, True], ids=["pre-norm", "post-norm"])
@pytest.mark.parametrize("first", [False, True], ids=["later-layer", "first-layer"])
@pytest.mark.parametrize("reduce", [None, lambda x: x * 2], ids=["one-rank", "two-ranks"])
def test_add_norm_linear(generator, post, first, reduce):
    seam = Seam(generator, post=post, reduce=reduce)
    needs = AddNormLinearNeeds(
        dtype="float32", norm=seam.spec, linear=seam.linear.spec, post_norm=seam.spec if post else None
    )
    op = ReferenceAddNormLinear.bind(needs, AddNormLinearTensors(seam.norm, seam.linear, seam.post_norm, reduce))
    residual = None if first else seam.residual
    want, want_residual = seam.oracle(residual)
    got, got_residual = op(seam.hidden.clone(), None if first else residual.clone())
    torch.testing.assert_close(got.double(), want, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(got_residual.double(), want_residual, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_add_norm_gated_linear(generator, activation):
    seam = Seam(generator, out=2 * OUT)
    needs = AddNormGatedLinearNeeds(dtype="float32", norm=seam.spec, linear=seam.linear.spec, activation=activation)
    op = ReferenceAddNormGatedLinear.bind(needs, AddNormGatedLinearTensors(seam.norm, seam.linear))
    both, want_residual = seam.oracle(seam.residual)
    gate, up = both[:, :OUT], both[:, OUT:]
    acted = {
        "silu": lambda x: x / (1 + math.exp(-x)),
        "gelu": lambda x: x * 0.5 * (1 + math.erf(x / math.sqrt(2))),
        "gelu_tanh": lambda x: 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    }[activation]
    want = torch.tensor([[acted(float(x)) for x in row] for row in gate], dtype=torch.float64) * up
    got, got_residual = op(seam.hidden, seam.residual)
    torch.testing.assert_close(got.double(), want, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(got_residual.double(), want_residual, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("is_fast", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_of_halves_on_a_cpu_with_and_without_onednn(generator, monkeypatch, dtype, is_fast, has_bias):
    monkeypatch.setattr(linear, "_has_fast_products", lambda dtype: is_fast)
    monkeypatch.setattr(linear, "SLICE_NUMBERS", 40)  # five rows of the weight at once
    x, weight = torch.randn(3, H, generator=generator).to(dtype), torch.randn(12, H, generator=generator).to(dtype)
    bias = torch.randn(12, generator=generator).to(dtype) if has_bias else None
    weights = LinearWeights(LinearSpec(in_features=H, out_features=12, has_bias=has_bias), {"weight": weight}, bias)
    want = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    got = linear.linear(x, weights)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), want, atol=2e-2, rtol=1e-2)


def test_add_norm_gated_linear_refuses_an_activation_it_does_not_have():
    needs = AddNormGatedLinearNeeds(
        dtype="float32",
        norm=NormSpec(size=H, eps=0),
        linear=LinearSpec(in_features=H, out_features=4),
        activation="relu2",
    )
    with pytest.raises(ConfigError, match=r"No op for 'gated' fits .*activation 'relu2'"):
        OpSelector(references(), pelton_fused_ops()).bind(
            "add_norm_gated_linear", needs, AddNormGatedLinearTensors(torch.ones(H), None)
        )


def test_references_refuse_a_weight_format_that_they_do_not_know():
    spec = LinearSpec(in_features=H, out_features=4, weight_format="awq")
    needs = LinearNeeds(dtype="float32", linear=spec)
    assert ReferenceLinear.unsupported(needs) == ["weight format 'awq', only 'plain' and q8_0, q4_0, q4_1"]


@pytest.mark.parametrize("soft_cap", [None, 3.0])
def test_add_norm_logits_of_some_rows_leaves_its_inputs(generator, soft_cap):
    seam = Seam(generator)
    needs = AddNormLogitsNeeds(
        dtype="float32", norm=seam.spec, linear=seam.linear.spec, vocab_size=OUT - 1, soft_cap=soft_cap
    )
    op = ReferenceAddNormLogits.bind(needs, AddNormLogitsTensors(seam.norm, seam.linear))
    before = seam.hidden.clone(), seam.residual.clone()
    want = seam.oracle(seam.residual)[0][[2, 0], : OUT - 1]
    want = want if soft_cap is None else soft_cap * torch.tanh(want / soft_cap)
    for _ in range(2):
        got = op(seam.hidden, seam.residual, torch.tensor([2, 0]))
        torch.testing.assert_close(got.double(), want, atol=1e-4, rtol=1e-4)
    assert got.dtype == torch.float32
    assert torch.equal(seam.hidden, before[0]) and torch.equal(seam.residual, before[1])


def test_embed_gives_zeros_for_ids_of_other_ranks(generator):
    weight = torch.randn(4, H, generator=generator)
    needs = EmbedNeeds(dtype="float32", num_rows=4, hidden_size=H, scale=2.0, tp_size=2)
    op = ReferenceEmbed.bind(needs, EmbedTensors(weight, first_row=4))
    got = op(torch.tensor([3, 4, 7, 8]))
    assert torch.equal(got, torch.stack([torch.zeros(H), weight[0] * 2, weight[3] * 2, torch.zeros(H)]))


def test_embed_rounds_its_scale_to_the_models_dtype():
    needs = EmbedNeeds(dtype="bfloat16", num_rows=1, hidden_size=1, scale=45.254834)
    op = ReferenceEmbed.bind(needs, EmbedTensors(torch.ones(1, 1).bfloat16(), 0))
    assert op(torch.tensor([0])).item() == 45.25


@pytest.mark.parametrize("rotary_dim", [6, 4])
def test_rotate_turns_pairs_half_a_head_apart(generator, rotary_dim):
    x, angle = torch.randn(2, 3, 6, generator=generator), torch.rand(2, rotary_dim // 2, generator=generator)
    got = rotate(x, angle.cos()[:, None], angle.sin()[:, None])
    want = x.clone()
    for t in range(2):
        for f in range(rotary_dim // 2):
            a, b, turn = x[t, :, f], x[t, :, f + rotary_dim // 2], complex(math.cos(angle[t, f]), math.sin(angle[t, f]))
            for head in range(3):
                z = complex(a[head], b[head]) * turn
                want[t, head, f], want[t, head, f + rotary_dim // 2] = z.real, z.imag
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("slots", [[], [5], [4, 5, 6, 7, 8, 12, 13], [9, -1, 19, -1], [-1, -1]])
def test_write_kv_is_bit_exact_and_skips_padding(generator, slots):
    pages = torch.randn(6, 2, 4, 2, 8, generator=generator)  # [blocks, 2, block_size, heads, head_dim]
    k_cache, v_cache = pages[:, 0], pages[:, 1]
    key, value = torch.randn(2, len(slots), 2, 8, generator=generator)
    want_k, want_v = k_cache.clone(), v_cache.clone()
    for token, slot in enumerate(slots):
        if slot >= 0:
            want_k[slot // 4, slot % 4], want_v[slot // 4, slot % 4] = key[token], value[token]
        else:
            key[token] = value[token] = float("nan")
    write_kv(key, value, k_cache, v_cache, torch.tensor(slots, dtype=torch.int64))
    assert torch.equal(k_cache, want_k) and torch.equal(v_cache, want_v)


def test_qk_norm_rope_write_kv_norms_then_rotates_and_writes_the_value_as_it_is(generator):
    make = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
    spec = NormSpec(size=8, eps=1e-6)
    needs = QkNormRopeWriteKvNeeds(
        dtype="float32",
        kv_dtype="float32",
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        rotary_dim=8,
        q_norm=spec,
        k_norm=spec,
    )
    angles = torch.arange(5)[:, None] * torch.tensor([1.0, 0.5, 0.25, 0.125])
    q_norm, k_norm = make(8), make(8)
    op = ReferenceQkNormRopeWriteKv.bind(
        needs, QkNormRopeWriteKvTensors(torch.cat([angles.cos(), angles.sin()], -1), q_norm, k_norm)
    )
    qkv, positions, caches = make(3, 64), torch.tensor([0, 4, 2]), torch.zeros(2, 3, 4, 2, 8)
    query = op(qkv.clone(), positions, torch.tensor([4, 11, -1]), caches[0], caches[1])

    def expected(part, weight):
        normed = rms_norm(part.view(3, -1, 8), weight, spec)
        return rotate(normed, angles.cos()[positions][:, None], angles.sin()[positions][:, None])

    torch.testing.assert_close(query, expected(qkv[:, :32], q_norm))
    keys, values = expected(qkv[:, 32:48], k_norm), qkv[:, 48:].view(3, 2, 8)
    torch.testing.assert_close(caches[0].view(12, 2, 8)[[4, 11]], keys[:2])
    assert torch.equal(caches[1].view(12, 2, 8)[[4, 11]], values[:2])
    assert caches.count_nonzero() == 4 * 16


def test_a_layer_that_shares_anothers_cache_does_not_write():
    needs = QkNormRopeWriteKvNeeds(
        dtype="float32", kv_dtype="float32", num_heads=1, num_kv_heads=1, head_dim=2, rotary_dim=0, writes_kv=False
    )
    op = ReferenceQkNormRopeWriteKv.bind(needs, QkNormRopeWriteKvTensors(None))
    caches = torch.zeros(2, 2, 4, 1, 2)
    assert torch.equal(op(torch.ones(1, 6), torch.tensor([0]), torch.tensor([4]), *caches), torch.ones(1, 1, 2))
    assert not caches.any()
