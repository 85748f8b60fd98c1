"""The breakdown of a run, and the comparison of the pool of threads with OpenMP's: on a model of some thousand parameters."""

import json
from ctypes import byref
from pathlib import Path

import pytest

from pelton.testing import fake_engine
from pelton_backends.native import breakdown, compare_pools, library
from pelton_backends.native.build import GROUPS


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    folder = fake_engine.make_model_folder(tmp_path_factory.mktemp("breakdown") / "tiny")
    config = json.loads((folder / "config.json").read_text())
    config |= {"vocab_size": 300, "max_position_embeddings": 1024, "head_dim": 8}
    (folder / "config.json").write_text(json.dumps(config))
    return {"model": str(folder), "load_format": "dummy", "dtype": "float32", "num_gpu_blocks_override": 200}


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    """The library's functions, put back afterwards."""
    found = library.kernels(*GROUPS)
    for name, function in list(vars(found).items()):
        monkeypatch.setattr(found, name, function)
    return found


def test_every_product_of_a_run_is_counted(settings):
    found = breakdown.measure(settings, num_requests=2)
    config = json.loads((Path(settings["model"]) / "config.json").read_text())
    num_out = sum(params.max_tokens for params in breakdown._requests(2, 1, 300)[1])
    assert found["out_tok_s"] == pytest.approx(num_out / found["seconds"])
    spent = {(one["kernel"], one["shape"]): one for one in found["kernels"]}
    logits = [one for (_, shape), one in spent.items() if shape.startswith(f"{config['hidden_size']} to 300,")]
    assert sum(one["flops"] for one in logits) == 2.0 * num_out * config["hidden_size"] * 300
    assert 0 < sum(one["seconds"] for one in found["kernels"]) < found["seconds"]
    assert spent["rope_attend", ""]["calls"] % config["num_hidden_layers"] == 0
    text = breakdown.render(found)
    assert (
        "of the ceiling" in text.lower() and "\nhost " in text and f"{found['out_tok_s']:.0f} output tokens/s" in text
    )


def test_a_shape_is_told_from_a_call():
    op = library.Linear(in_features=8, out_features=6)
    call = [byref(op), None, None, None, None, 20, None]
    assert breakdown.shape_of("linear", call) == ("8 to 6, rows <= 32", 2.0 * 20 * 8 * 6)
    assert breakdown.shape_of("attend", call) == ("", 0.0)


def test_ratios_have_an_interval():
    pairs = [(1.0 + index / 1000, 1.0) for index in range(101)]
    ratio, low, high = compare_pools.ratio_of(pairs)
    assert ratio == pytest.approx(1.05) and low == pytest.approx(1.04) and high == pytest.approx(1.06)
    assert compare_pools.ratio_of(pairs[:1]) == (1.0, 1.0, 1.0)


@pytest.mark.slow
def test_the_pool_and_openmp_run_in_turn(settings, monkeypatch):
    """Compiles the library once more, in a third of the time without optimization."""
    monkeypatch.setattr(compare_pools, "OPENMP_FLAGS", (*compare_pools.OPENMP_FLAGS, "-O0"))
    found = compare_pools.measure(settings, rows=[2, 0], num_pairs=3)
    assert [*found] == ["2 rows", f"a prompt of {compare_pools.PROMPT}"]
    assert all(len(pairs) == 3 and min(map(min, pairs)) > 0 for pairs in found.values())
    assert "POOL BY OPENMP" in compare_pools.render(found)


def test_pairs_change_their_order_and_the_first_does_not_count():
    used, clock = [], iter(range(8))

    class Switch:
        def use(self, which):
            used.append(which)

    pairs = compare_pools._pairs(Switch(), [lambda: float(next(clock))] * 8)
    one, other = compare_pools.OPENMP, compare_pools.POOL
    assert used == [one, other, other, one, one, other, other, one, other]
    assert pairs == [(2.0, 3.0), (5.0, 4.0), (6.0, 7.0)]
