"""An op that a plugin declares: from its hook to a layer that calls it."""

import sys
from dataclasses import dataclass

import pytest
import torch

from pelton.entries import Entry, OpEntry
from pelton.errors import PluginError
from pelton.hookspecs import hookimpl
from pelton.ops.interface import FusedOp, optional
from pelton.testing.model_driver import make_test_build
from pelton.testing.plugins import plugins_of


@dataclass(frozen=True, kw_only=True)
class ScanNeeds:
    size: int
    is_reversed: bool = optional(False)


@dataclass
class ScanTensors:
    start: torch.Tensor


class ReferenceScan:
    handles = frozenset(["is_reversed"])

    @staticmethod
    def unsupported(needs):
        return []

    @staticmethod
    def bind(needs, tensors):
        def scan(x):
            x = x.flip(0) if needs.is_reversed else x
            return tensors.start + x.cumsum(0)

        return scan


class FastScan:
    """Knows nothing of reversed scans."""

    @staticmethod
    def unsupported(needs):
        return [] if needs.size < 8 else [f"size {needs.size}"]

    @staticmethod
    def bind(needs, tensors):
        return lambda x: "fast"


SCAN = FusedOp(name="scan", needs=ScanNeeds, tensors=ScanTensors, reference=f"{__name__}:ReferenceScan")


class ScanPlugin:
    PELTON_API = ">=1,<2"

    @hookimpl
    def pelton_fused_ops(self):
        return [Entry(name="scan", load=f"{__name__}:SCAN")]

    @hookimpl
    def pelton_ops(self):
        return [OpEntry(name="fast.scan", op="scan", load=f"{__name__}:FastScan")]


@pytest.fixture(autouse=True)
def module(monkeypatch):
    monkeypatch.setitem(sys.modules, __name__, sys.modules.get(__name__) or sys)
    for name in ("SCAN", "ReferenceScan", "FastScan"):
        monkeypatch.setattr(sys.modules[__name__], name, globals()[name], raising=False)


def test_a_layer_binds_an_op_that_a_plugin_declared():
    ops = make_test_build({}, plugins_of(ScanPlugin())).ops
    tensors, x = ScanTensors(torch.tensor([1.0])), torch.tensor([[1.0], [2.0]])
    assert ops.bind("scan", ScanNeeds(size=1), tensors)(x) == "fast"
    assert ops.bind("scan", ScanNeeds(size=9), tensors)(x).tolist() == [[2.0], [4.0]]
    assert ops.bind("scan", ScanNeeds(size=1, is_reversed=True), tensors)(x).tolist() == [[3.0], [4.0]]
    assert [(choice.op, choice.names, choice.refused) for choice in ops.choices] == [
        ("scan", ("fast.scan",), ()),
        ("scan", ("reference.scan",), (("fast.scan", "size 9"),)),
        ("scan", ("reference.scan",), (("fast.scan", "does not handle is_reversed=True"),)),
    ]


def test_an_op_that_nobody_declared_has_no_implementations():
    class Undeclared(ScanPlugin):
        @hookimpl
        def pelton_fused_ops(self):
            return []

    with pytest.raises(PluginError, match=r"'fast.scan' is offered for 'scan'; there are embed"):
        make_test_build({}, plugins_of(Undeclared()))
