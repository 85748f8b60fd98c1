"""Encoder attention in C against softmax written out in float64, for rows of any lengths, on the rows of a QKV product; and whole layers
against the ops that they are made of."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from pelton.attention.interface import AttentionNeeds
from pelton.attention.metadata import CommonMetadata
from pelton.ops.interface import (
    AddNormNeeds,
    AddNormTensors,
    EmbedNeeds,
    EmbedTensors,
    LinearNeeds,
    LinearSpec,
    LinearTensors,
    LinearWeights,
    NormSpec,
)
from pelton.ops.selector import pack_weights
from pelton_backends.native import library
from pelton_backends.native.embed import NativeEmbed
from pelton_backends.native.encoder import NativeEncoderBackend, WholeLayers
from pelton_backends.native.layer_norm import NativeAddNorm
from pelton_backends.native.linear import NativeLinear
from pelton_backends.reference.ops import ReferenceAddNorm

pytestmark = pytest.mark.covering(3)


def needs(num_heads=3, num_kv_heads=3, head_dim=8, **changes):
    given = {"block_size": 16, "dtype": "float32", "attention_type": "encoder"}
    return AttentionNeeds(head_dim=head_dim, num_heads=num_heads, num_kv_heads=num_kv_heads, **given | changes)


def described(lengths, heads, kv_heads, head_dim, num_padding=0):
    """(a backend, the step of rows of these lengths as it describes it)"""
    starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    total = int(starts[-1])
    backend = NativeEncoderBackend(
        needs(heads, kv_heads, head_dim), torch.device("cpu"), max_num_seqs=16, max_num_tokens=1024, max_model_len=512
    )
    return backend, backend.build(CommonMetadata(
        query_start_loc=starts, seq_lens=starts.diff(), block_table=torch.empty(len(lengths), 0), slot_mapping=torch.empty(0),
        num_reqs=len(lengths), num_tokens=total + num_padding, num_actual_tokens=total, num_decode_rows=0, num_decode_tokens=0,
        max_query_len=max(lengths), max_seq_len=max(lengths),
    ))  # fmt: skip


def attend(lengths, heads, kv_heads, head_dim, *, split=True, num_padding=0):
    """(what the backend gives, query, key, value); split: views of one product's rows."""
    total = sum(lengths)
    qkv = torch.randn(total + num_padding, heads + 2 * kv_heads, head_dim)
    query, key, value = qkv.split([heads, kv_heads, kv_heads], dim=1)
    if not split:
        query, key, value = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (query, key, value))
    backend, step = described(lengths, heads, kv_heads, head_dim, num_padding)
    layer = SimpleNamespace(sliding_window=None, scale=0.3, num_heads=heads, num_kv_heads=kv_heads)
    output = torch.full((total + num_padding, heads, head_dim), torch.nan)
    return backend.attend(layer, query, key, value, step, output)[:total], query, key, value


def expected(lengths, query, key, value):
    parts, start = [], 0
    for length in lengths:
        q, k, v = (x[start : start + length].transpose(0, 1).double() for x in (query, key, value))
        k, v = (x.repeat_interleave(len(q) // len(x), dim=0) for x in (k, v))
        parts.append(((q @ k.transpose(-1, -2) * 0.3).softmax(-1) @ v).transpose(0, 1))
        start += length
    return torch.cat(parts).float()


@pytest.mark.parametrize(
    "heads, kv_heads, head_dim", [(3, 3, 32), (2, 2, 64), (3, 3, 8), (2, 2, 20), (4, 2, 16), (6, 2, 5)]
)
@pytest.mark.parametrize("lengths", [
    [5], [1, 1, 1], [7, 7, 7], [3, 19, 4, 19, 1, 18, 40], [4, 9, 0, 0], [24, 25, 32, 33, 48, 49], [63, 64, 65], [200, 2, 500],
], ids=str)  # fmt: skip
def test_equals_softmax_within_each_row(isa, heads, kv_heads, head_dim, lengths):
    found, *inputs = attend(lengths, heads, kv_heads, head_dim, num_padding=3)
    torch.testing.assert_close(found, expected(lengths, *inputs), atol=1e-5, rtol=1e-5)


def test_heads_that_do_not_lie_behind_each_other(isa):
    found, *inputs = attend([3, 40, 7], 3, 3, 32, split=False)
    torch.testing.assert_close(found, expected([3, 40, 7], *inputs), atol=1e-5, rtol=1e-5)


def test_a_row_does_not_depend_on_the_others(isa):
    torch.manual_seed(0)
    together, *_ = attend([33, 70, 5], 3, 3, 32)
    torch.manual_seed(0)
    alone, *_ = attend([33], 3, 3, 32)  # the first numbers are the same
    assert torch.equal(together[:33], alone)


@pytest.mark.parametrize("changes, reason", [
    ({"dtype": "bfloat16"}, "dtype bfloat16, only float32"),
    ({"attention_type": "decoder"}, "attention type decoder, only encoder"),
    ({"num_kv_heads": 2}, "3 heads are not a multiple of 2 kv heads"),
])  # fmt: skip
def test_what_it_refuses(changes, reason):
    assert NativeEncoderBackend.unsupported(needs(**changes)) == [reason]
    assert NativeEncoderBackend.unsupported(needs()) == []


HEADS, HEAD_DIM = 2, 32
SIZE = HEADS * HEAD_DIM


def linear(num_in, num_out, activation=None):
    weight, bias = torch.randn(num_out, num_in) / num_in**0.5, torch.randn(num_out)
    spec = LinearSpec(in_features=num_in, out_features=num_out, has_bias=True)
    op = NativeLinear.bind(
        LinearNeeds(dtype="float32", linear=spec), LinearTensors(LinearWeights(spec, {"weight": weight}, bias))
    )
    assert activation is None or op.take_activation(activation)
    pack_weights([op])
    return op


def norm():
    given = AddNormNeeds(dtype="float32", norm=NormSpec(size=SIZE, eps=1e-5, is_centered=True))
    return NativeAddNorm.bind(given, AddNormTensors(torch.randn(2, SIZE)))


def parts(inner=96):
    return SimpleNamespace(
        attention=SimpleNamespace(sliding_window=None, scale=0.3, num_heads=HEADS, num_kv_heads=HEADS),
        qkv=linear(SIZE, 3 * SIZE), out=linear(SIZE, SIZE), up=linear(SIZE, inner, "gelu"), down=linear(inner, SIZE),
        out_norm=norm(), down_norm=norm(),
    )  # fmt: skip


def tables(**changes):
    needs = EmbedNeeds(dtype="float32", num_rows=50, hidden_size=SIZE)
    words = NativeEmbed.bind(needs, EmbedTensors(torch.randn(50, SIZE), 0, None))
    given = {"words": words, "positions": torch.randn(600, SIZE), "types": torch.randn(2, SIZE), "norm": norm()}
    return SimpleNamespace(**given | changes)


def one_by_one(layer, hidden, backend, step):
    query, key, value = layer.qkv(hidden).view(len(hidden), 3 * HEADS, HEAD_DIM).split(HEADS, dim=1)
    output = torch.zeros(len(hidden), HEADS, HEAD_DIM)
    attended = backend.attend(layer.attention, query, key, value, step, output).flatten(1)
    hidden = layer.out_norm(layer.out(attended), hidden)[0]
    return layer.down_norm(layer.down(layer.up(hidden)), hidden)[0]


@pytest.fixture(params=[1, 2, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    library.kernels()
    yield
    torch.set_num_threads(before)
    library.kernels()


@pytest.mark.parametrize("lengths", [
    [1], [0, 0], [7, 7, 7], [200], [130, 0, 0], [32] * 9, [3, 190, 4, 19, 1, 180, 40, 64, 64], [63, 65, 400, 2], [33] * 31,
], ids=str)  # fmt: skip
@pytest.mark.parametrize("inner", [96, 100])
@pytest.mark.parametrize("num_padding", [0, 5])
def test_whole_layers_are_the_ops_one_by_one(isa, threads, lengths, inner, num_padding):
    torch.manual_seed(len(lengths))
    backend, step = described(lengths, HEADS, HEADS, HEAD_DIM, num_padding)
    layers, embeddings, total = [parts(inner) for _ in range(3)], tables(), sum(lengths)
    ids, positions = torch.randint(50, (total + num_padding,)), torch.randint(600, (total + num_padding,))
    summed = embeddings.words(ids) + embeddings.types[0] + embeddings.positions[positions]
    first = embeddings.norm(summed, None)[0]
    want = first.clone()
    for layer in layers:
        want = one_by_one(layer, want, backend, step)
    whole = backend.bind_layers(layers, embeddings)
    assert whole.embeds and whole.fits(step)
    error = (
        0 if inner % 32 == 0 else 1e-4
    )  # few rows of a weight that does not fit into panels are summed up in another order
    for found in (whole.embed(ids, positions, step), whole(first, step)):
        torch.testing.assert_close(found[:total], want[:total], atol=error, rtol=error)


def test_whole_layers_are_those_of_parts_in_c():
    backend, _ = described([1], HEADS, HEADS, HEAD_DIM)
    assert backend.bind_layers([parts(), parts()], tables()) is not None
    grouped = SimpleNamespace(scale=1.0, num_heads=4, num_kv_heads=2)
    for name, other in (("up", None), ("qkv", lambda x: x), ("down_norm", ReferenceAddNorm), ("attention", grouped)):
        layer = parts()
        setattr(layer, name, other)
        assert backend.bind_layers([parts(), layer], tables()) is None


def test_embeddings_that_are_not_in_c_come_from_the_caller():
    backend, _ = described([1], HEADS, HEADS, HEAD_DIM)
    scaled = EmbedNeeds(dtype="float32", num_rows=50, hidden_size=SIZE, scale=2.0)
    words = NativeEmbed.bind(scaled, EmbedTensors(torch.randn(50, SIZE), 0, None))
    for changes in ({"words": words}, {"words": torch.nn.Identity()}, {"norm": ReferenceAddNorm}):
        assert not backend.bind_layers([parts()], tables(**changes)).embeds


def test_long_texts_go_op_by_op():
    backend, step = described([3, WholeLayers.MOST_TOKENS, 5], HEADS, HEADS, HEAD_DIM)
    _, longer = described([3, WholeLayers.MOST_TOKENS + 1], HEADS, HEADS, HEAD_DIM)
    whole = backend.bind_layers([parts()], tables())
    assert whole.fits(step) and not whole.fits(longer)
