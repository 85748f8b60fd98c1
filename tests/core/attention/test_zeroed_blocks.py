"""A backend that multiplies what it masks within a row's blocks says so, or the suite tells its author."""

from __future__ import annotations

import pytest
import torch

from pelton.attention.interface import AttentionBackend, BoundAttention
from pelton.attention.phases import Phased
from pelton.testing.attention import AttentionBackendConformance
from pelton.testing.graphs import StaticAttention


class WholeBlocks(BoundAttention):
    """A row at a time over all of its blocks; the weights beyond its end are 0."""

    def __call__(self, query, metadata, output):
        layer, size = self.layer, self.layer.k_cache.shape[1]
        starts = metadata.query_start_loc.tolist()
        for row, length in enumerate(metadata.seq_lens.tolist()):
            tokens = slice(starts[row], starts[row + 1])
            if tokens.start == tokens.stop:
                continue
            blocks = metadata.block_table[row, : -(-length // size)].long()
            keys, values = (
                cache[blocks].flatten(0, 1).double().repeat_interleave(layer.num_heads // layer.num_kv_heads, 1)
                for cache in (layer.k_cache, layer.v_cache)
            )
            position = torch.arange(length - (tokens.stop - tokens.start), length)
            scores = torch.einsum("thd,lhd->htl", query[tokens].double(), keys) * layer.scale
            is_hidden = torch.arange(len(keys)) > position[:, None]
            weights = scores.masked_fill(is_hidden, -torch.inf).softmax(-1)
            output[tokens] = torch.einsum("htl,lhd->thd", weights, values).to(output.dtype)


class Multiplying(AttentionBackend):
    name = "multiplying"
    needs_zeroed_blocks = True
    unsupported = StaticAttention.unsupported

    def build(self, common, key=None):
        return common

    def bind(self, layer):
        return WholeBlocks(layer)


class Unsaid(Multiplying):
    name = "unsaid"
    needs_zeroed_blocks = False


class TestMultiplying(AttentionBackendConformance):
    backend = Multiplying


def test_one_that_does_not_say_so_fails_the_suite():
    class Suite(AttentionBackendConformance):
        backend = Unsaid

    with pytest.raises(AssertionError, match="not close"):
        Suite().test_what_is_no_rows_is_selected_away("decodes-of-odd-lengths", "infinity")


@pytest.mark.parametrize(
    "decode, prefill, needs",
    [(Unsaid, Unsaid, False), (Multiplying, Unsaid, True), (Unsaid, Multiplying, True)],
)
def test_two_backends_need_what_either_needs(decode, prefill, needs):
    sizes = {"max_num_seqs": 1, "max_num_tokens": 1, "max_model_len": 1}
    assert Phased(decode, prefill)(None, torch.device("cpu"), **sizes).needs_zeroed_blocks is needs
