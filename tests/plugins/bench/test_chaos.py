"""Faults at random, for some seconds; and how an answer's end is judged."""

from __future__ import annotations

import pytest

from pelton_plugins.bench.soak.chaos import ChaosArguments, torment
from pelton_plugins.bench.soak.chaos_client import judge

STREAM = {"stream": True, "max_tokens": 2}
WHOLE = {"stream": False, "max_tokens": 2}


@pytest.mark.parametrize(
    "status, rest, body, kind",
    [
        (
            200,
            b'h\r\n\r\ndata: {"text":" w1"}\n\ndata: {"text":" w1","finish_reason":"length"}\n\ndata: [DONE]',
            STREAM,
            "whole",
        ),
        (200, b'h\r\n\r\ndata: {"text":" w1"}\n\ndata: [DONE]', STREAM, "wrong"),
        (200, b'h\r\n\r\ndata: {"text":" w1"}\n\n', STREAM, "cut"),
        (200, b'h\r\n\r\ndata: {"error":{"message":"x"}}\n\ndata: [DONE]', STREAM, "error"),
        (200, b'h\r\n\r\n{"usage":{"completion_tokens":2}}', WHOLE, "whole"),
        (200, b'h\r\n\r\n{"usage":{"completion_tokens":1}}', WHOLE, "wrong"),
        (503, b'h\r\n\r\n{"error":{"message":"x"}}', WHOLE, "refused"),
        (500, b"h\r\n\r\nInternal Server Error", WHOLE, "wrong"),
    ],
)
def test_ends_are_judged(status, rest, body, kind):
    assert judge(status, rest, body).kind == kind


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_server_survives_faults():
    """How many requests and faults a time is enough for follows from the machine's speed."""
    for slower in (1, 4, 16):
        result = torment(ChaosArguments(duration_s=5 * slower, clients=8, mean_fault_s=0.8 * slower, seed=3))
        assert [one for one in result["checks"] if not one["ok"]] == [], result
        if result["outcomes"].get("whole", 0) > 10 and sum(result["faults"].values()) >= 3:
            return
    raise AssertionError(result)
