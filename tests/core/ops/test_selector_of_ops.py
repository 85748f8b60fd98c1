"""Which implementation of a fused op a layer keeps."""

import sys
from dataclasses import dataclass, replace
from types import ModuleType

import pytest
import torch

from pelton.entries import Entry, OpEntry
from pelton.errors import ConfigError, PluginError
from pelton.ops.interface import (
    FUSED_OPS,
    AddNormLinearNeeds,
    AddNormLinearTensors,
    FusedOp,
    LinearNeeds,
    LinearSpec,
    LinearTensors,
    LinearWeights,
    NormSpec,
    optional,
)
from pelton.ops.selector import OpSelector
from pelton.testing.plugins import plugins_of, references

MODULE = "test_op_implementations"
NEEDS = LinearNeeds(dtype="float32", linear=LinearSpec(in_features=2, out_features=2))
TENSORS = LinearTensors(LinearWeights(NEEDS.linear, {"weight": torch.eye(2)}))


@pytest.fixture(autouse=True)
def module(monkeypatch):
    monkeypatch.setitem(sys.modules, MODULE, ModuleType(MODULE))


def entry(name, priority, reasons=(), token_range=None, op="linear", on_loaded=None, handles=None, orders=None):
    """An op that returns its own name."""

    class Bound:
        def __call__(self, x, *rest):
            return name

        def pack(self, order):
            on_loaded.append((name, "pack", order))
            return order != "impossible"

        def packed(self, order):
            on_loaded.append((name, "packed", order))

        def weights_loaded(self):
            if on_loaded is not None:
                on_loaded.append(name)

    class Op:
        @staticmethod
        def unsupported(needs):
            return list(reasons)

        @staticmethod
        def bind(needs, tensors):
            return Bound()

    if orders is not None:
        Bound.orders = orders
    if handles is not None:
        Op.handles = handles
    if token_range is not None:
        Op.token_range = staticmethod(lambda needs: token_range)
    setattr(sys.modules[MODULE], name, Op)
    return OpEntry(name=name, op=op, load=f"{MODULE}:{name}", priority=priority)


def rows(count):
    return torch.zeros(count, 2)


@pytest.mark.parametrize(
    "make, winner",
    [
        pytest.param(lambda: [entry("plain", 10), entry("fused", 90)], "fused", id="higher-priority-wins"),
        pytest.param(lambda: [entry("plain", 10), entry("fused", 90, ["dtype"])], "plain", id="refusal-falls-through"),
        pytest.param(lambda: [entry("b", 50), entry("a", 50)], "a", id="tie-goes-by-name"),
        pytest.param(lambda: [entry("a", 50), entry("other", 90, op="embed")], "a", id="other-ops-do-not-count"),
    ],
)
def test_selects_op(make, winner):
    entries = make()
    assert OpSelector(entries).bind("linear", NEEDS, TENSORS)(rows(1)) == winner
    assert OpSelector(reversed(entries)).bind("linear", NEEDS, TENSORS)(rows(1)) == winner


def test_batch_sizes_that_the_best_does_not_serve_go_to_the_next():
    entries = [entry("few", 90, token_range=(1, 16)), entry("many", 80, token_range=(64, None)), entry("plain", 10)]
    selector = OpSelector(entries)
    op = selector.bind("linear", NEEDS, TENSORS)
    assert [op(rows(n)) for n in (0, 1, 16, 17, 63, 64, 900)] == [
        "plain", "few", "few", "plain", "plain", "many", "many",
    ]  # fmt: skip
    assert selector.choices[0].names == ("few", "many", "plain")


def test_an_op_for_all_sizes_is_called_without_a_wrapper():
    op = OpSelector([entry("fused", 90), entry("plain", 10)]).bind("linear", NEEDS, TENSORS)
    assert type(op).__name__ == "Bound"


def test_no_fit_lists_every_entry_with_its_reasons():
    entries = [entry("fused", 90, ["needs sm80"]), entry("plain", 10, ["weight format 'awq'", "dtype"])]
    with pytest.raises(ConfigError, match=r"'linear' fits .*fused: needs sm80; plain: weight format 'awq', dtype"):
        OpSelector(entries).bind("linear", NEEDS, TENSORS)
    with pytest.raises(ConfigError, match="none is offered"):
        OpSelector([]).bind("linear", NEEDS, TENSORS)
    with pytest.raises(ConfigError, match="few fit for some batch sizes only"):
        OpSelector([entry("few", 9, token_range=(0, 16))]).bind("linear", NEEDS, TENSORS)


def test_an_op_that_does_not_exist_is_refused_with_the_list():
    with pytest.raises(PluginError, match="'odd' is offered for 'softmax'; there are embed, add_norm, linear"):
        OpSelector([entry("odd", 10, op="softmax")])
    with pytest.raises(PluginError, match="'odd' does not say which op it is for"):
        OpEntry(name="odd", load="m:o")


def test_entries_made_with_the_old_name_of_their_op_serve_it():
    old = OpEntry(name="old", seam="linear", load="m:o")
    assert old == OpEntry(name="old", op="linear", load="m:o")


@pytest.mark.parametrize(
    "spec, handles, why",
    [
        pytest.param({}, None, None, id="nothing-asked"),
        pytest.param({"has_bias": True}, {"has_bias"}, None, id="named"),
        pytest.param({"has_bias": True}, None, "does not handle has_bias=True", id="silent"),
        pytest.param(
            {"has_bias": True, "weight_format": "odd"}, {"has_bias"}, "does not handle weight_format=odd", id="another"
        ),
    ],
)
def test_an_op_that_does_not_name_a_need_is_refused(spec, handles, why):
    """Also when the need is of a spec inside: a new field is never dropped in silence."""
    selector = OpSelector(
        [entry("fused", 90, handles=handles), entry("plain", 10, handles={"has_bias", "weight_format"})]
    )
    needs = LinearNeeds(dtype="float32", linear=LinearSpec(in_features=2, out_features=2, **spec))
    assert selector.bind("linear", needs, TENSORS)(rows(1)) == ("fused" if why is None else "plain")
    assert selector.choices[0].refused == (() if why is None else (("fused", why),))


def test_a_composed_op_is_made_of_what_is_chosen_for_its_parts():
    linear = LinearSpec(in_features=2, out_features=2, weight_format="odd")
    needs = AddNormLinearNeeds(dtype="float32", norm=NormSpec(size=2, eps=1e-6), linear=linear)
    tensors = AddNormLinearTensors(torch.ones(2), LinearWeights(linear, {}))
    core = [one for one in references() if one.op in FUSED_OPS]
    with pytest.raises(ConfigError, match=r"No op for 'linear' fits .*weight format 'odd'"):
        OpSelector(core).bind("add_norm_linear", needs, tensors)
    selector = OpSelector([*core, entry("format", 50, handles={"weight_format"})])
    result, residual = selector.bind("add_norm_linear", needs, tensors)(torch.tensor([[3.0, 4.0]]), None)
    assert result == "format" and residual.tolist() == [[3.0, 4.0]]
    assert {choice.op: choice.names for choice in selector.choices} == {
        "add_norm": ("reference.add_norm",), "linear": ("format",), "add_norm_linear": ("reference.add_norm_linear",),
    }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TurnNeeds:
    angle: int
    is_exact: bool = optional(False)


TURN = FusedOp(name="turn", needs=TurnNeeds, tensors=dict, reference=f"{MODULE}:slow")


def test_a_declared_op_has_its_reference_and_what_is_offered_for_it():
    fast = entry("fast", 50, op="turn")
    entry("slow", 1, op="turn", handles={"is_exact"})
    sys.modules[MODULE].TURN = TURN
    selector = OpSelector([fast], [Entry(name="turn", load=f"{MODULE}:TURN")])
    assert selector.bind("turn", TurnNeeds(angle=90), {})(rows(1)) == "fast"
    assert selector.bind("turn", TurnNeeds(angle=90, is_exact=True), {})(rows(1)) == "slow"
    assert selector.choices[1].names == ("reference.turn",)
    with pytest.raises(PluginError, match="'linear' is declared twice"):
        sys.modules[MODULE].TURN = replace(TURN, name="linear")
        OpSelector([], [Entry(name="turn", load=f"{MODULE}:TURN")])


@pytest.mark.parametrize(
    "orders, expected",
    [
        pytest.param((["a"], ["a"]), [("x", "pack", "a"), ("x", "packed", "a"), ("y", "packed", "a")], id="agreed"),
        pytest.param(
            (["b", "a"], ["a"]), [("x", "pack", "a"), ("x", "packed", "a"), ("y", "packed", "a")], id="second"
        ),
        pytest.param((["a"], ["b"]), [], id="disagreed"),
        pytest.param((["a"], None), [], id="one-reads-only-what-is-loaded"),
        pytest.param(
            (["impossible"], ["impossible"]), [("x", "pack", "impossible"), ("y", "pack", "impossible")], id="refused"
        ),
    ],
)
def test_weights_are_packed_where_all_their_readers_know_the_order(orders, expected):
    heard = []
    weights = LinearWeights(NEEDS.linear, {"weight": torch.eye(2)}, finish=lambda: heard.append("finish"))
    selector = OpSelector(
        [
            entry("x", 90, token_range=(0, 4), on_loaded=heard, orders=orders[0]),
            entry("y", 80, on_loaded=heard, orders=orders[1]),
        ]
    )
    selector.bind("linear", NEEDS, LinearTensors(weights))
    selector.weights_loaded()
    assert heard == ["finish", *expected, "x", "y"]


def test_ops_hear_once_when_their_weights_are_in_place():
    heard = []
    selector = OpSelector([entry("few", 90, token_range=(0, 4), on_loaded=heard), entry("plain", 10, on_loaded=heard)])
    selector.bind("linear", NEEDS, TENSORS)
    selector.weights_loaded()
    assert heard == ["few", "plain"]


def test_equal_choices_are_listed_once_with_who_was_passed_over():
    selector = OpSelector([entry("fused", 90, ["no"]), entry("plain", 10)])
    for _ in range(3):
        selector.bind("linear", NEEDS, TENSORS)
    (choice,) = selector.choices
    assert (choice.op, choice.names, choice.refused) == ("linear", ("plain",), (("fused", "no"),))


def test_there_is_a_reference_for_every_op_of_core():
    plugins = plugins_of()
    offered = plugins.entries("pelton_ops", device_type="cuda")
    declared = {entry.resolve().name for entry in plugins.entries("pelton_fused_ops")}
    assert sorted(e.op for e in offered) == sorted({*FUSED_OPS, *declared})
    for one in offered:
        assert one.resolve().unsupported and {"bind", "compose"} & set(dir(one.resolve()))


def test_strangers_ops_are_recordable_only_when_they_say_so():
    selector = OpSelector([entry("silent", 90, token_range=(0, 4)), entry("speaking", 50)])
    sys.modules[MODULE].speaking.is_recordable = True
    selector.bind("linear", NEEDS, TENSORS)
    assert selector.unrecordable() == ["silent"]
