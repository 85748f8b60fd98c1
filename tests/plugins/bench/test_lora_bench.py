"""`pelton bench lora` on a tiny model."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from pelton.errors import ConfigError
from pelton.testing.models import make_tiny_checkpoint
from pelton_plugins.bench import lora
from pelton_plugins.bench.table.shapes import SHAPES


@pytest.mark.parametrize("targets", ["all", "qv"])
def test_measures_requests_with_and_without_adapters(tmp_path, targets):
    path = make_tiny_checkpoint(tmp_path / "tiny", "llama", with_tokenizer=False)
    settings = {
        "model": str(path), "skip_tokenizer_init": True, "enable_lora": True, "max_loras": 2, "max_lora_rank": 4,
        "lora_target_modules": [] if targets == "all" else ["q_proj", "v_proj"],
        "max_model_len": 128, "kv_cache_memory_bytes": 2**22, "max_num_seqs": 4, "dtype": "float32",
    }  # fmt: skip
    arguments = {"rank": 4, "input_len": 8, "output_len": 24, "repeats": 1}
    job = {"settings": settings, "rows": 3, "adapters": 2, "targets": targets, "arguments": arguments}
    found = json.loads(json.dumps(lora.measure(job)))
    assert (found["rows"], found["adapters"]) == (3, 2)
    assert min(found[name] for name in ("base_tok_s", "adapter_tok_s", "start_s", "load_s", "gap_ms")) > 0
    assert {len(times) for times in found["seconds"].values()} == {3}
    assert f"{100 * found['adapter_tok_s'] / found['base_tok_s']:.1f} %" in lora.render([found])
    hidden, heads, kv, inner = 64, 4 * 16, 2 * 16, 96
    numbers = 4 * (2 * hidden + heads + kv)  # q and v
    if targets == "all":
        numbers += 4 * (2 * hidden + kv + heads + 2 * (hidden + inner) + inner + hidden)
    assert found["adapter_bytes"] == 2 * 4 * numbers * 4  # adapters, layers, float32


def test_the_share_that_memory_allows_is_of_the_bytes():
    """64 adapters of rank 16 of Llama-3.1-8B are 5.37 GB: 1.25 ms beside a step of 5 ms."""
    model = SimpleNamespace(hf_config=SHAPES["llama3.1-8b"], dtype="bfloat16")
    size = 64 * lora.adapter_bytes(model, 16, lora.targets_of("all"))
    assert size == 5_368_709_120
    assert lora.adapter_bytes(model, 16, lora.targets_of("attention")) * 64 == 1_744_830_464
    line = {
        "rows": 64, "adapters": 64, "targets": "all", "base_tok_s": 12_800.0, "adapter_tok_s": 9_600.0, "adapter_bytes": size,
        "bandwidth_gb_s": 4_295.0, "start_s": 1.0, "load_s": 1.0, "gap_ms": 1.0, "usual_gap_ms": 1.0,
    }  # fmt: skip
    assert lora.allowed_share(line) == pytest.approx(5.0 / 6.25, rel=1e-3)
    shown = lora.render([line])
    assert "75.0 %" in shown
    assert "80.0 %" in shown
    assert "94 %" in shown
    assert "(5,369 MB) at 4,295 GB/s" in shown


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("qv", ("q_proj", "v_proj")),
        ("down_proj", ("down_proj",)),
        ("q_proj,o_proj", ("q_proj", "o_proj")),
        ("mlp", None),
    ],
)
def test_sets_of_modules(name, expected):
    if expected is None:
        with pytest.raises(ConfigError, match="target_modules has 'mlp'; write all, attention, qv, or names"):
            lora.LoraArguments(target_modules=["all", name])
    else:
        assert lora.targets_of(name) == expected


def test_rows_and_adapters_belong_together():
    with pytest.raises(ConfigError, match="rows has 3 entries and adapters 1"):
        lora.LoraArguments(adapters=[1])
