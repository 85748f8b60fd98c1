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
def test_a_server_survives_faults():
    result = torment(ChaosArguments(duration_s=9, clients=8, mean_fault_s=1.0, seed=3))
    assert [one for one in result["checks"] if not one["ok"]] == [], result
    assert result["outcomes"]["whole"] > 10 and sum(result["faults"].values()) >= 3
