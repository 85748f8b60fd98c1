"""Backends that define `forward` are served as they were, and their authors are told once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from pelton.attention import old_methods
from pelton.attention.interface import AttentionBackend
from pelton.errors import PluginError
from pelton.testing.attention import CASES, AttentionBackendConformance
from pelton.testing.graphs import StaticAttention, StaticBound

ONCE = "test_old_methods.OldBackend defines forward, which 0.2 no longer calls. Define bind"


@pytest.fixture(autouse=True)
def nothing_told() -> Iterator[None]:
    old_methods._warn.cache_clear()
    yield
    old_methods._warn.cache_clear()


class OldBackend(AttentionBackend):
    name = "old"
    handles = StaticAttention.handles
    unsupported = StaticAttention.unsupported

    def build(self, common, key=None):
        return common

    def slot_mapping(self, metadata):
        return metadata.slot_mapping

    def forward(self, layer, query, metadata, output):
        StaticBound(layer)(query, metadata, output)
        return output


class OldFusedBackend(OldBackend):
    """One kernel for steps of one token a row, as such backends had."""

    name = "old_fused"
    num_fused = 0

    def forward_qkv(self, layer, qkv, positions, metadata, output):
        if metadata.max_query_len > 1:
            return super().forward_qkv(layer, qkv, positions, metadata, output)
        type(self).num_fused += 1
        query = layer.qk_norm_rope_write_kv(qkv, positions, self.slot_mapping(metadata))
        return self.forward(layer, query, metadata, output)


class TestOldBackend(AttentionBackendConformance):
    backend = OldBackend


class TestOldFusedBackend(AttentionBackendConformance):
    backend = OldFusedBackend


def test_its_own_forward_qkv_is_called():
    suite = TestOldFusedBackend()
    for name, count in (("decodes-of-odd-lengths", 1), ("mixed", 0)):
        OldFusedBackend.num_fused = 0
        suite.check_write_and_attend(suite.make_step(CASES[name]))
        assert OldFusedBackend.num_fused == count


def test_its_author_is_told_once(caplog):
    suite = TestOldBackend()
    for _ in range(2):
        suite.make_step(CASES["mixed"])
    assert caplog.text.count(ONCE) == 1


def test_a_layer_may_call_forward_of_a_backend_that_has_bind(caplog):
    class Suite(AttentionBackendConformance):
        backend = StaticAttention

    step = Suite().make_step(CASES["mixed"])
    step.write()
    want = step.run()
    for _ in range(2):
        got = step.backend.forward(
            step.layer, step.query, step.backend.build(step.common), torch.zeros_like(step.query)
        )
    assert torch.equal(got[: step.num_tokens], want)
    assert torch.equal(step.backend.slot_mapping(step.common), step.common.slot_mapping)
    assert caplog.text.count("AttentionLayer calls AttentionBackend.forward, which 0.2 removes") == 1


def test_one_that_overrides_forward_of_a_backend_that_has_bind_is_refused():
    """Nobody would call it, and nobody would see that."""
    with pytest.raises(
        PluginError, match=r"Late overrides forward, which its base class no longer calls\. Override bind"
    ):

        class Late(StaticAttention):
            def forward(self, layer, query, metadata, output):
                return output


def test_one_that_defines_neither_is_told_what_to_define():
    class Neither(AttentionBackend):
        name = "neither"
        unsupported = StaticAttention.unsupported

        def build(self, common, key=None):
            return common

    backend = Neither(CASES["mixed"].needs(), torch.device("cpu"), max_num_seqs=1, max_num_tokens=1, max_model_len=1)
    with pytest.raises(PluginError, match=r"Neither does not define bind\. Return a BoundAttention"):
        backend.bind(None)
