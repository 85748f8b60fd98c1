"""The C backend keeps what every attention backend promises, by each instruction set that this CPU has."""

from dataclasses import replace

import pytest
import torch

from pelton.attention.interface import AttentionNeeds, GraphSupport, KVLayout
from pelton.testing.attention import CASES, AttentionBackendConformance, AttentionCase, AttentionStep
from pelton_backends.native import library
from pelton_backends.native.backend import NativeBackend
from pelton_backends.native.plugin import pelton_attention_backends

NEEDS = AttentionNeeds(head_dim=64, num_heads=8, num_kv_heads=2, block_size=16, dtype="float32")
TOLERANCES = {"float32": 2e-5, "bfloat16": 2e-2}


class TestNativeBackend(AttentionBackendConformance):
    backend = NativeBackend


LONG = ((1, 0), (1, 63), (1, 64), (1, 65), (1, 300), (2, 0), (70, 3), (33, 129))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"sliding_window": 50},
        {"sliding_window": 1},
        {"soft_cap": 3.0, "sliding_window": 70},
        {"head_dim": 64, "num_heads": 9, "num_kv_heads": 3},
        {"head_dim": 80, "block_size": 7},
        {"head_dim": 17},
        {"head_dim": 2, "num_heads": 48, "num_kv_heads": 1},
        {"head_dim": 130, "num_heads": 26, "num_kv_heads": 2, "block_size": 32, "num_padding": 5},
    ],
    ids=str,
)
def test_every_path_equals_the_oracle(isa, dtype, changes):
    case = replace(AttentionCase(rows=LONG, dtype=dtype), **changes)
    step = AttentionStep(NativeBackend, case)
    step.write()
    torch.testing.assert_close(step.run().double(), step.expected(), atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_path_spoils_only_the_row_that_has_a_nan(isa, dtype):
    step = AttentionStep(NativeBackend, replace(CASES["mixed"], dtype=dtype))
    step.write()
    step.query[3] = float("nan")
    found = step.run()
    assert found[3].isnan().all()
    assert not found[:3].isnan().any() and not found[4:].isnan().any()


def test_the_layout_has_heads_first():
    assert NativeBackend.kv_layout(NEEDS) == KVLayout(heads_first=True)
    assert NativeBackend.graph_support is GraphSupport.UNIFORM_SINGLE_TOKEN_DECODE


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"dtype": "float16"}, "dtype float16"),
        ({"kv_dtype": "fp8"}, "kv dtype fp8"),
        ({"num_kv_heads": 3}, "no multiple"),
        ({"num_heads": 49, "num_kv_heads": 1}, "49 heads a kv head"),
    ],
)
def test_what_it_refuses(changes, reason):
    (why,) = NativeBackend.unsupported(replace(NEEDS, **changes))
    assert reason in why


def test_it_is_offered_for_cpus_only():
    (entry,) = pelton_attention_backends("cpu")
    assert entry.resolve() is NativeBackend and entry.priority == 50
    assert pelton_attention_backends("cuda") == []


def test_the_best_instruction_set_is_the_default():
    assert library.kernels().isa in library.ISAS
