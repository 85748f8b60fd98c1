"""The example IO processor: its suite, offline, and over HTTP with a server and an engine of their own."""

from __future__ import annotations

import httpx
import numpy as np
import pytest
from pelton_e2e import serving

from pelton import LLM, PoolingParams
from pelton.errors import ConfigError, RequestError
from pelton.testing.io_processor import IOProcessorConformance
from pelton.testing.models import make_tiny_encoder

GRID = np.linspace(0, 1, 48).reshape(6, 8)
SMALL = {"max_num_seqs": 4, "disable_log_stats": True}


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return str(make_tiny_encoder(tmp_path_factory.mktemp("encoder"), "bert"))


class TestConformance(IOProcessorConformance):
    good_data = {"values": GRID.tolist(), "patch": 2}  # noqa: RUF012
    bad_data = (
        "grid", {}, {"values": []}, {"values": [[]]}, {"values": [[0.5], [0.1, 0.2]]}, {"values": [[2.0]], "patch": 1},
        {"values": [[0.5]], "patch": 2}, {"values": [[0.5, float("nan")]], "patch": 1}, {"values": [[1.0]], "more": 1},
    )  # fmt: skip

    @pytest.fixture(autouse=True)
    def _installed(self, installed):
        pass

    def make_processor(self, context):
        from pelton_grid_vectors.processor import GridProcessor

        return GridProcessor(context)


def test_offline_each_patch_has_its_vector(installed, encoder):
    from pelton_grid_vectors.processor import FIRST_TOKEN, GridRequest

    with LLM(model=encoder, io_processor_plugin="grid", **SMALL) as llm:
        (output,) = llm.encode({"data": GridRequest(values=GRID.tolist(), patch=2)}, use_tqdm=False)
        vectors = output.outputs.array()
        assert vectors.shape == (3, 4, 48)
        levels = llm.llm_engine.model.vocab_size - FIRST_TOKEN - 1
        patch = GRID[2:4, 4:6]
        ids = (FIRST_TOKEN + np.rint(patch * levels)).astype(int).ravel().tolist()
        (alone,) = llm.encode({"prompt_token_ids": ids}, PoolingParams(use_activation=False), use_tqdm=False)
        np.testing.assert_allclose(vectors[1, 2], alone.outputs.data, atol=1e-5)
        with pytest.raises(RequestError, match="divide both sides of the grid, 6 and 8"):
            llm.encode({"data": {"values": GRID.tolist(), "patch": 4}}, use_tqdm=False)


def test_over_http_it_is_the_same(installed, encoder, tmp_path):
    with serving(encoder, "--io-processor-plugin", "grid", "--max-num-seqs", "4", log=tmp_path / "log") as (url, _):
        response = httpx.post(f"{url}/pooling", json={"data": {"values": GRID.tolist(), "patch": 2}}, timeout=60)
        body = response.json()
        assert response.status_code == 200 and set(body) == {"request_id", "created_at", "data"}
        bad = httpx.post(f"{url}/pooling", json={"data": {"values": GRID.tolist(), "patch": 5}}, timeout=60)
        assert bad.status_code == 400 and bad.json()["error"]["param"] == "data.patch"
    from pelton_grid_vectors.processor import GridAnswer, GridRequest

    with LLM(model=encoder, io_processor_plugin="grid", **SMALL) as llm:
        (output,) = llm.encode({"data": GridRequest(values=GRID.tolist(), patch=2)}, use_tqdm=False)
    np.testing.assert_allclose(GridAnswer(**body["data"]).array(), output.outputs.array(), atol=1e-5)


def test_without_the_package_the_start_fails(encoder):
    with pytest.raises(ConfigError, match="io_processor_plugin"):
        LLM(model=encoder, io_processor_plugin="grid", **SMALL)
