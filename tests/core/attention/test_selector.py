"""Which attention backend wins, and what is said when none does."""

import sys
from dataclasses import replace
from types import ModuleType

import pytest

from pelton.attention.interface import OPTIONAL_NEEDS, AttentionBackend, AttentionNeeds, GraphSupport
from pelton.attention.selector import AttentionSelector, select_backend
from pelton.config import EngineConfig
from pelton.entries import BackendEntry
from pelton.errors import ConfigError
from pelton.plugins import load_plugins

NEEDS = AttentionNeeds(head_dim=64, num_heads=8, num_kv_heads=2, block_size=16, dtype="bfloat16")
MODULE = "test_selector_backends"


@pytest.fixture(autouse=True)
def backends_module(monkeypatch):
    """A module for entries to load from."""
    monkeypatch.setitem(sys.modules, MODULE, ModuleType(MODULE))


def entry(name, priority, refuses=(), *, handles=(), graph=GraphSupport.NEVER, **fields):
    """A backend that refuses when one of `refuses` is not None of the needs: here, always with that reason."""

    class Backend(AttentionBackend):
        @classmethod
        def unsupported(cls, needs, capability=None):
            return list(refuses)

        def build(self, common, key=None):
            return common

        def forward(self, layer, query, metadata, output):
            return output

        def slot_mapping(self, metadata):
            return metadata.slot_mapping

    Backend.name, Backend.handles, Backend.graph_support = name, frozenset(handles), graph
    setattr(sys.modules[MODULE], name, Backend)
    return BackendEntry(name=name, load=f"{MODULE}:{name}", priority=priority, **fields)


@pytest.mark.parametrize(
    "make, winner",
    [
        pytest.param(lambda: [entry("slow", 10), entry("fast", 90)], "fast", id="higher-priority-wins"),
        pytest.param(
            lambda: [entry("fast", 90, ["head_dim 64"]), entry("slow", 10)], "slow", id="refusal-falls-through"
        ),
        pytest.param(lambda: [entry("b", 50), entry("a", 50)], "a", id="tie-goes-by-name"),
    ],
)
def test_selects_backend(make, winner):
    entries = make()
    assert select_backend(entries, NEEDS).name == winner
    assert select_backend(reversed(entries), NEEDS).name == winner  # install order is irrelevant


def test_a_named_backend_wins_over_every_priority():
    selection = select_backend([entry("fast", 90), entry("slow", 10)], NEEDS, named="slow")
    assert (selection.name, selection.reason) == ("slow", "named in the settings")


def test_a_named_backend_that_refuses_stops_with_its_reasons():
    entries = [entry("flash", 90, ["needs sm80", "dtype bfloat16"]), entry("slow", 10)]
    with pytest.raises(ConfigError, match="'flash' cannot serve this model: needs sm80, dtype bfloat16"):
        select_backend(entries, NEEDS, named="flash")


def test_an_unknown_name_lists_what_there_is():
    with pytest.raises(
        ConfigError, match=r"attention_backend is 'flush'; for this model and device there is fast, slow\."
    ):
        select_backend([entry("slow", 10), entry("fast", 90)], NEEDS, named="flush")


def test_no_fit_lists_every_backend_with_its_reasons():
    entries = [entry("flash", 90, ["needs sm80"]), entry("sdpa", 10, ["dtype int4", "head_dim 7"])]
    with pytest.raises(ConfigError) as error:
        select_backend(entries, NEEDS)
    assert "flash (priority 90): needs sm80; sdpa (priority 10): dtype int4, head_dim 7" in str(error.value)
    assert "head_dim=64" in str(error.value)
    with pytest.raises(ConfigError, match="none is offered for this device"):
        select_backend([], NEEDS)


NON_DEFAULT = {
    "sliding_window": 128, "attention_chunk_size": 64, "logit_soft_cap": 30.0, "has_sinks": True, "has_alibi": True,
    "attention_type": "encoder",
    "is_mla": True, "is_sparse": True, "has_mm_prefix": True, "decode_context_parallel": 2,
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(OPTIONAL_NEEDS))
def test_a_need_that_a_backend_has_not_read_about_is_refused(name):
    needs = replace(NEEDS, **{name: NON_DEFAULT[name]})
    old, new = entry("old", 90), entry("new", 10, handles=[name])
    assert select_backend([old, new], NEEDS).name == "old"
    selection = select_backend([old, new], needs)
    assert selection.name == "new"
    assert selection.verdicts[0].reasons == (f"does not handle {name}={NON_DEFAULT[name]}",)


def test_every_optional_need_is_a_field_with_a_default():
    fields = {f for f in AttentionNeeds.__dataclass_fields__ if f not in ("head_dim", "num_heads", "num_kv_heads")}
    assert fields >= OPTIONAL_NEEDS and NEEDS.optional() == []


def test_a_backend_that_cannot_be_imported_is_a_reason_not_a_stop():
    broken = BackendEntry(name="broken", load="no_such_module_here:Backend", priority=90)
    selection = select_backend([broken, entry("slow", 10)], NEEDS)
    assert selection.name == "slow" and "No module named 'no_such_module_here'" in selection.reason
    with pytest.raises(ConfigError, match=r"'broken' cannot serve this model: .*no_such_module_here"):
        select_backend([broken], NEEDS, named="broken")


def test_the_reason_says_who_was_passed_over():
    selection = select_backend([entry("flash", 90, ["needs sm80"]), entry("sdpa", 10)], NEEDS)
    assert selection.reason == "priority 10, the first that fits, after flash (priority 90): needs sm80"


def test_a_models_graph_support_is_the_least_of_its_backends():
    selector = AttentionSelector(
        [
            entry("fast", 90, graph=GraphSupport.ALWAYS),
            entry("windows", 50, handles=["sliding_window"], graph=GraphSupport.UNIFORM_BATCH),
        ]
    )
    assert selector.graph_support() is GraphSupport.ALWAYS
    selector.select(NEEDS)
    assert selector.graph_support() is GraphSupport.ALWAYS
    selector.select(replace(NEEDS, sliding_window=8))
    selector.select(NEEDS)
    assert selector.graph_support() is GraphSupport.UNIFORM_BATCH
    assert [s.name for s in selector.selections()] == ["fast", "windows"]


@pytest.mark.parametrize(
    "device_type, spelling, name",
    [
        ("cuda", "TRITON_ATTN", "triton"), ("cuda", "triton", "triton"), ("cpu", "CPU_ATTN", "native"),
        ("cpu", "TORCH_SDPA", "sdpa"), ("cpu", "SDPA", "sdpa"), ("cpu", "NATIVE", "native"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("change_case", [str, str.lower])
def test_our_backends_say_what_vllm_calls_them(device_type, spelling, name, change_case):
    ours = load_plugins(only=[]).entries("pelton_attention_backends", device_type=device_type)
    entries = [entry(each.name, each.priority, aliases=each.aliases) for each in ours]
    config = EngineConfig.from_flat(attention_backend=change_case(spelling)).attention
    assert select_backend(entries, NEEDS, named=config.backend).name == name


def test_a_plugin_gives_its_backend_other_names_and_a_name_wins_over_them():
    entries = [entry("fast", 90, aliases=("FLASHINFER", "sdpa")), entry("sdpa", 10)]
    assert select_backend(entries, NEEDS, named="flashinfer").name == "fast"
    assert select_backend(entries, NEEDS, named="SDPA").name == "sdpa"


def test_errors_about_a_named_backend_show_what_was_typed():
    entries = [entry("triton", 50, ["needs sm80"], aliases=("TRITON_ATTN",)), entry("sdpa", 10)]
    with pytest.raises(
        ConfigError, match=r"attention_backend is 'FLASH_ATTN'; for this model and device there is sdpa\."
    ):
        select_backend(entries, NEEDS, named="FLASH_ATTN")
    with pytest.raises(ConfigError, match=r"Attention backend 'triton_attn' \(triton\) cannot serve.*needs sm80"):
        select_backend(entries, NEEDS, named="triton_attn")
