"""One group, two backends: rows with one token to one of them, the others to the other."""

from __future__ import annotations

import pytest
import torch

from pelton.attention.interface import AttentionNeeds, GraphSupport, KVLayout
from pelton.attention.phases import Phased
from pelton.attention.selector import AttentionSelector
from pelton.entries import BackendEntry
from pelton.errors import ConfigError
from pelton.testing.attention import CASES, AttentionBackendConformance
from pelton.testing.graphs import StaticAttention, StaticBound

NEEDS = AttentionNeeds(head_dim=64, num_heads=8, num_kv_heads=2, block_size=16, dtype="float32")
seen: list[tuple[str, int]] = []  # (backend, rows) of each call


class SeenDecode(StaticBound):
    def __call__(self, query, metadata, output):
        assert metadata.max_query_len == 1 and metadata.num_reqs == metadata.num_tokens
        seen.append(("decode", metadata.num_reqs))
        super().__call__(query, metadata, output)


class SeenPrefill(StaticBound):
    def __call__(self, query, metadata, output):
        seen.append(("prefill", metadata.num_reqs))
        super().__call__(query, metadata, output)


class Decode(StaticAttention):
    name = "decode_only"
    phases = frozenset({"decode"})

    def bind(self, layer):
        return SeenDecode(layer)


class Prefill(StaticAttention):
    name = "prefill_only"
    phases = frozenset({"prefill"})

    def bind(self, layer):
        return SeenPrefill(layer)


class OtherPages(Decode):
    name = "other_pages"

    @classmethod
    def kv_layout(cls, needs):
        return KVLayout(heads_first=True)


class TestBoth(AttentionBackendConformance):
    backend = Phased(Decode, Prefill)


def entry(backend, priority):
    return BackendEntry(name=backend.name, load=f"{__name__}:{backend.__name__}", priority=priority)


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, __name__, sys.modules.get(__name__) or __import__("types").ModuleType(__name__))
    for backend in (Decode, Prefill, OtherPages, StaticAttention):
        monkeypatch.setattr(sys.modules[__name__], backend.__name__, backend, raising=False)


def test_each_phase_has_the_best_that_serves_it():
    chosen = AttentionSelector([entry(Decode, 90), entry(Prefill, 80), entry(StaticAttention, 50)]).select(NEEDS)
    assert chosen.names == ("decode_only", "prefill_only")
    assert "decode: decode_only (priority 90" in chosen.reason and "prefill: prefill_only (priority 80" in chosen.reason
    assert AttentionSelector([entry(Decode, 90), entry(StaticAttention, 50)]).select(NEEDS).names == (
        "decode_only", "static",
    )  # fmt: skip
    alone = AttentionSelector([entry(Decode, 10), entry(StaticAttention, 50)]).select(NEEDS)
    assert alone.backend is StaticAttention and not alone.names


def test_one_that_lays_pages_otherwise_is_passed_over():
    chosen = AttentionSelector([entry(OtherPages, 90), entry(StaticAttention, 50)]).select(NEEDS)
    assert chosen.backend is StaticAttention
    with pytest.raises(ConfigError, match="pages lie otherwise"):
        AttentionSelector([entry(OtherPages, 90), entry(StaticAttention, 50)], named_decode="other_pages").select(NEEDS)


def test_a_phase_may_be_named_and_one_that_does_not_serve_it_is_refused():
    entries = [entry(Decode, 10), entry(Prefill, 10), entry(StaticAttention, 50)]
    assert AttentionSelector(entries, named_decode="decode_only").select(NEEDS).names == ("decode_only", "static")
    with pytest.raises(ConfigError, match="does not serve prefill"):
        AttentionSelector(entries, named="decode_only").select(NEEDS)


def test_rows_go_to_their_backend():
    suite = TestBoth()
    mixed = next(case for case in CASES.values() if len({tokens == 1 for tokens, _ in case.rows}) == 2)
    step = suite.make_step(mixed)
    step.write()
    seen.clear()
    got = step.run()
    num_decodes = sum(tokens == 1 for tokens, _ in mixed.rows)
    assert seen == [("decode", num_decodes), ("prefill", len(mixed.rows) + mixed.num_padding - num_decodes)]
    torch.testing.assert_close(got.double(), step.expected(), atol=1e-4, rtol=1e-4)


NEVER, SINGLE = GraphSupport.NEVER, GraphSupport.UNIFORM_SINGLE_TOKEN_DECODE
UNIFORM, ALWAYS = GraphSupport.UNIFORM_BATCH, GraphSupport.ALWAYS


@pytest.mark.parametrize(
    "decode, prefill, expected",
    [
        (ALWAYS, ALWAYS, ALWAYS), (ALWAYS, UNIFORM, UNIFORM), (UNIFORM, ALWAYS, UNIFORM), (SINGLE, ALWAYS, SINGLE),
        (ALWAYS, SINGLE, SINGLE), (NEVER, ALWAYS, NEVER),
        (ALWAYS, NEVER, SINGLE),  # steps of one token a row do not run it
    ],
)  # fmt: skip
def test_graph_support_is_the_least_of_what_a_captured_step_runs(decode, prefill, expected):
    decodes = type("Decodes", (Decode,), {"graph_support": decode})
    prefills = type("Prefills", (Prefill,), {"graph_support": prefill})
    assert Phased(decodes, prefills).graph_support is expected
