"""Which implementation of a fused seam a layer keeps."""

import sys
from types import ModuleType

import pytest
import torch

from pelton.entries import OpEntry
from pelton.errors import ConfigError, PluginError
from pelton.ops.interface import SEAMS, LinearNeeds, LinearSpec, LinearTensors, LinearWeights
from pelton.ops.selector import OpSelector
from pelton.testing.plugins import plugins_of

MODULE = "test_op_implementations"
NEEDS = LinearNeeds(dtype="float32", linear=LinearSpec(in_features=2, out_features=2))
TENSORS = LinearTensors(LinearWeights(NEEDS.linear, {"weight": torch.eye(2)}))


@pytest.fixture(autouse=True)
def module(monkeypatch):
    monkeypatch.setitem(sys.modules, MODULE, ModuleType(MODULE))


def entry(name, priority, reasons=(), token_range=None, seam="linear", on_loaded=None):
    """An op that returns its own name."""

    class Bound:
        def __call__(self, x, *rest):
            return name

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

    if token_range is not None:
        Op.token_range = staticmethod(lambda needs: token_range)
    setattr(sys.modules[MODULE], name, Op)
    return OpEntry(name=name, seam=seam, load=f"{MODULE}:{name}", priority=priority)


def rows(count):
    return torch.zeros(count, 2)


@pytest.mark.parametrize(
    "make, winner",
    [
        pytest.param(lambda: [entry("plain", 10), entry("fused", 90)], "fused", id="higher-priority-wins"),
        pytest.param(lambda: [entry("plain", 10), entry("fused", 90, ["dtype"])], "plain", id="refusal-falls-through"),
        pytest.param(lambda: [entry("b", 50), entry("a", 50)], "a", id="tie-goes-by-name"),
        pytest.param(lambda: [entry("a", 50), entry("other", 90, seam="embed")], "a", id="other-seams-do-not-count"),
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


def test_weights_know_how_many_ops_read_them():
    for entries, num_readers in (
        ([entry("few", 90, token_range=(1, 16)), entry("plain", 10)], 2),
        ([entry("fused", 90), entry("plain", 10)], 1),
    ):
        weights = LinearWeights(NEEDS.linear, {"weight": torch.eye(2)})
        OpSelector(entries).bind("linear", NEEDS, LinearTensors(weights))
        assert weights.num_readers == num_readers


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


def test_a_seam_that_does_not_exist_is_refused_with_the_list():
    with pytest.raises(PluginError, match="'odd' offers seam 'softmax'; the seams are embed, add_norm_linear"):
        OpSelector([entry("odd", 10, seam="softmax")])


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
    assert (choice.seam, choice.names, choice.refused) == ("linear", ("plain",), (("fused", "no"),))


def test_core_offers_a_reference_for_every_seam_of_a_dense_step():
    offered = {e.seam for e in plugins_of().entries("pelton_ops", device_type="cuda")}
    assert offered == set(SEAMS) - {"moe", "lora"}


def test_strangers_ops_are_recordable_only_when_they_say_so():
    selector = OpSelector([entry("silent", 90, token_range=(0, 4)), entry("speaking", 50)])
    sys.modules[MODULE].speaking.is_recordable = True
    selector.bind("linear", NEEDS, TENSORS)
    assert selector.unrecordable() == ["silent"]
