"""FlexAttention keeps what every attention backend promises."""

import pytest

from pelton.attention.interface import AttentionNeeds
from pelton.testing.attention import CASES, AttentionBackendConformance
from pelton_backends.libraries.flex import FlexAttentionBackend


class TestFlexAttention(AttentionBackendConformance):
    backend = FlexAttentionBackend


@pytest.mark.parametrize("name", CASES)
def test_refuses_none_of_the_suites_cases(name):
    assert FlexAttentionBackend.unsupported(CASES[name].needs()) == []


def test_says_why_it_refuses():
    needs = AttentionNeeds(head_dim=64, num_heads=3, num_kv_heads=2, block_size=16, dtype="float64", kv_dtype="fp8")
    assert [reason.partition(",")[0] for reason in FlexAttentionBackend.unsupported(needs)] == [
        "dtype float64", "kv dtype fp8", "3 heads are not a multiple of 2 kv heads",
    ]  # fmt: skip
