"""`pelton.testing.server.serve_tiny`, with which plugins test what they add to a server."""

from __future__ import annotations

import pytest

from pelton.testing.server import serve_tiny


@pytest.mark.usefixtures("forks")
def test_what_it_wrote_is_there_when_it_has_ended() -> None:
    with serve_tiny("--served-model-name", "tiny") as server:
        assert server.ask("GET", "/v1/models").json()["data"][0]["id"] == "tiny"
        assert server.lines == []
    assert any(server.url in line for line in server.lines)
