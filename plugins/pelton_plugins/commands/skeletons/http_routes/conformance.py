"""Conformance of this package's routes, in a server of a tiny model with random weights."""

from __future__ import annotations

from pelton.testing.http import Call, HTTPConformance


class TestSkeletonRoutes(HTTPConformance):
    calls = (
        Call("GET", "/skeleton/model", holds="model"),
        Call("POST", "/skeleton/length", body={"text": "The cat sat."}, holds="length"),
        Call("POST", "/skeleton/length", body={"text": 5}, status=400, holds="text must be a string"),
        Call("POST", "/skeleton/length", body={"text": "x" * 100_000}, status=400),
    )
