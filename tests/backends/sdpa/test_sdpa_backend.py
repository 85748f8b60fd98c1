"""The torch backend keeps what every attention backend promises, and a few things of its own."""

import pytest
import torch

from pelton.attention.interface import AttentionNeeds, GraphSupport, KVLayout
from pelton.testing.attention import CASES, AttentionBackendConformance, AttentionStep
from pelton.testing.latent_attention import LatentAttentionConformance
from pelton.testing.sparse_attention import SparseAttentionConformance
from pelton_backends.sdpa.backend import SDPABackend
from pelton_backends.sdpa.encoder import SDPAEncoderBackend
from pelton_backends.sdpa.mla import SDPAMLABackend
from pelton_backends.sdpa.plugin import pelton_attention_backends
from pelton_backends.sdpa.sparse import SDPASparseBackend
from pelton_backends.sdpa.state_rows import StateRows

NEEDS = AttentionNeeds(head_dim=64, num_heads=8, num_kv_heads=2, block_size=16, dtype="float32")


class TestSDPABackend(AttentionBackendConformance):
    backend = SDPABackend


class TestSDPAMLABackend(LatentAttentionConformance):
    backend = SDPAMLABackend


class TestSDPASparseBackend(SparseAttentionConformance):
    backend = SDPASparseBackend


class EightTokenBlocks(SDPABackend):
    """As a backend whose kernels have a block size of their own."""

    name = "sdpa8"

    @classmethod
    def unsupported(cls, needs, capability=None):
        return [f"block size {needs.block_size}, only %8"] if needs.block_size % 8 else []

    @classmethod
    def kv_layout(cls, needs):
        return KVLayout(kernel_block_size=8)


class TestKernelBlocks(AttentionBackendConformance):
    backend = EightTokenBlocks


@pytest.mark.parametrize("name", CASES)
def test_refuses_none_of_the_suites_cases(name):
    assert SDPABackend.unsupported(CASES[name].needs()) == []


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"dtype": "float64"}, "dtype float64, only float32, bfloat16, float16"),
        ({"kv_dtype": "int8"}, "kv dtype int8"),
        ({"num_heads": 3}, "3 heads are not a multiple of 2 kv heads"),
    ],
)
def test_says_why_it_refuses(change, reason):
    from dataclasses import replace

    (found,) = SDPABackend.unsupported(replace(NEEDS, **change))
    assert found.startswith(reason)


def test_is_offered_as_the_reference():
    offered = [(entry.name, entry.priority, entry.resolve()) for entry in pelton_attention_backends("cpu")]
    encoder = ("sdpa_encoder", 10, SDPAEncoderBackend)
    latents = [("sdpa_mla", 10, SDPAMLABackend), ("sdpa_sparse", 10, SDPASparseBackend)]
    states = {"state_space", "delta_rule", "key_delta_rule", "selective_scan", "lightning", "rg_lru", "short_conv"}
    assert [one for one in offered if one[0] not in states] == [encoder, ("sdpa", 10, SDPABackend), *latents]
    found = {name: backend for name, priority, backend in offered if priority == 10 and issubclass(backend, StateRows)}
    assert states == set(found) and all(backend.name == name for name, backend in found.items())
    elsewhere = pelton_attention_backends("cuda")
    assert [(entry.name, entry.priority, entry.resolve()) for entry in elsewhere] == offered[:2]
    assert SDPABackend.graph_support is GraphSupport.NEVER


def test_the_cache_may_have_another_dtype_than_the_model():
    step = AttentionStep(SDPABackend, CASES["mixed"])
    step.layer.bind_cache((step.layer.k_cache.bfloat16(), step.layer.v_cache.bfloat16()), 0, step.backend)
    step.write()
    torch.testing.assert_close(step.run().double(), step.expected(), atol=2e-2, rtol=2e-2)


def test_decodes_of_a_windowed_layer_read_the_window_only(monkeypatch):
    step = AttentionStep(SDPABackend, CASES["window"])
    step.write()
    metadata = step.backend.build(step.common)
    step.layer.attend(step.query, metadata, torch.empty_like(step.query))
    assert metadata.decodes[9, None].rows.shape == (4 * 9,)
    assert all(len(plan.rows) <= 8 + plan.tokens.stop - plan.tokens.start for plan in metadata.prefills[9, None])


def test_layers_of_one_window_share_a_steps_plan():
    step = AttentionStep(SDPABackend, CASES["mixed"])
    step.write()
    metadata = step.backend.build(step.common)
    for _ in range(2):
        step.layer.attend(step.query, metadata, torch.empty_like(step.query))
    assert len(metadata.decodes) == len(metadata.prefills) == 1


def test_attends_to_later_tokens_when_the_step_is_not_causal():
    step = AttentionStep(SDPABackend, CASES["prefill"])
    step.write()
    step.common.causal = False
    got = step.run()
    keys = step.keys[0].repeat_interleave(2, dim=1).transpose(0, 1)
    values = step.values[0].repeat_interleave(2, dim=1).transpose(0, 1)
    scores = step.query.transpose(0, 1) @ keys.transpose(1, 2) * step.layer.scale
    torch.testing.assert_close(got, (scores.softmax(-1) @ values).transpose(0, 1), atol=2e-5, rtol=2e-5)
