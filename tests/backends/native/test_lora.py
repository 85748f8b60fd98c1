"""Adapters in C against the reference."""

from __future__ import annotations

import pytest
import torch
from pelton_lora_op import SHAPES, check_lora, make_lora_case

from pelton_backends.native.lora import NativeLora
from pelton_platforms.device.graphs.call_graph import CallGraphRecorder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("slots", "size", "parts", "options"), SHAPES, ids=lambda value: "")
def test_follows_the_reference(slots, size, parts, options, dtype):
    check_lora(make_lora_case(slots, size, parts, dtype=dtype, **options), NativeLora, slots)


def test_many_rows_on_several_threads():
    slots = [-1, 0, 2, 1] * 40
    check_lora(make_lora_case(slots, 700, (600, 130), norm=True), NativeLora, slots)


def test_other_dtypes_are_refused():
    assert NativeLora.unsupported(make_lora_case([0], 8, (8,), dtype=torch.float64).needs) == [
        "dtype float64, only float32, bfloat16, float16"
    ]


def test_a_recorded_call_looks_adapters_up_again():
    case = make_lora_case([-1, 0], 64, (32,))
    op = NativeLora.bind(case.needs, case.tensors)
    x, output = case.x, case.output
    before = output.clone()
    recorder = CallGraphRecorder()
    recorder.begin()
    op(x, output)
    graph = recorder.end()
    assert torch.equal(output[0], before[0])
    output.copy_(before)
    case.tensors.rows.place(torch.tensor([0, -1]))
    graph.replay()
    assert torch.equal(output[1], before[1])
    assert not torch.equal(output[0], before[0])
