"""`pelton bench lora` on a tiny model."""

from __future__ import annotations

import json

import pytest

from pelton.errors import ConfigError
from pelton.testing.models import make_tiny_checkpoint
from pelton_plugins.bench import lora


def test_measures_requests_with_and_without_adapters(tmp_path):
    path = make_tiny_checkpoint(tmp_path / "tiny", "llama", with_tokenizer=False)
    settings = {
        "model": str(path), "skip_tokenizer_init": True, "enable_lora": True, "max_loras": 2, "max_lora_rank": 4,
        "max_model_len": 128, "kv_cache_memory_bytes": 2**22, "max_num_seqs": 4, "dtype": "float32",
    }  # fmt: skip
    arguments = {"rank": 4, "input_len": 8, "output_len": 24, "repeats": 1}
    found = json.loads(
        json.dumps(lora.measure({"settings": settings, "rows": 3, "adapters": 2, "arguments": arguments}))
    )
    assert (found["rows"], found["adapters"]) == (3, 2)
    assert min(found[name] for name in ("base_tok_s", "adapter_tok_s", "start_s", "load_s", "gap_ms")) > 0
    assert {len(times) for times in found["seconds"].values()} == {3}
    assert f"{100 * found['adapter_tok_s'] / found['base_tok_s']:.1f} %" in lora.render([found])


def test_rows_and_adapters_belong_together():
    with pytest.raises(ConfigError, match="rows has 3 entries and adapters 1"):
        lora.LoraArguments(adapters=[1])
