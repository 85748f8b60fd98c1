"""The start table says what was found, what was chosen and why."""

from __future__ import annotations

import re

import msgspec
import pytest

from pelton import LLM
from pelton.engine.start_table import start_table
from pelton.messages.report import DeviceReport, EngineInfo
from pelton.testing.fake_model import fake_resolved_model
from pelton.testing.models import make_tiny_checkpoint


def test_table_holds_choices_reasons_sizes_and_seconds() -> None:
    report = DeviceReport(
        device="cpu: two threads", attention_backend="sdpa", attention_reason="the only one that fits",
        weights_bytes=3 * 2**30 // 2, notes=["max_num_seqs lowered to 4"],
    )  # fmt: skip
    info = EngineInfo(
        report=report, num_blocks=101, block_size=16, kv_cache_bytes=2**20, max_num_seqs=4, max_num_batched_tokens=2048,
        max_model_len=800, phase_s={"load weights": 1.25, "profile": 0.5},
    )  # fmt: skip
    model = msgspec.structs.replace(
        fake_resolved_model(), notes=["rope scaling ignored"], made_of="model 'fake' of acme"
    )
    assert start_table(info, model).splitlines() == [
        "  model      fake (Fake, float32, dummy, model 'fake' of acme)",
        "  device     cpu: two threads",
        "  attention  sdpa (the only one that fits)",
        "  weights    1.5 GiB",
        "  KV cache   101 blocks of 16 tokens, 1.0 MiB, room for 2.0 requests of full length",
        "  limits     max_model_len 800, max_num_seqs 4, max_num_batched_tokens 2048",
        "  start      1.8 s (load weights 1.2 s, profile 0.5 s)",
        "  note       rope scaling ignored",
        "  note       max_num_seqs lowered to 4",
    ]


@pytest.mark.parametrize(
    "settings, made_of",
    [
        ({}, r"model 'llama' of models \(pelton .*\)"),
        (
            {"model_impl": "transformers"},
            r"modules of transformers, by 'transformers' of transformers_models \(pelton .*\)",
        ),
    ],
    ids=["own", "transformers"],
)
def test_the_model_line_says_whose_modules_run(settings, made_of, tmp_path) -> None:
    path = str(make_tiny_checkpoint(tmp_path, "llama"))
    with LLM(model=path, max_model_len=64, kv_cache_memory_bytes=2**20, disable_log_stats=True, **settings) as llm:
        line, *_ = start_table(llm.llm_engine.info, llm.llm_engine.model).splitlines()
    assert re.fullmatch(rf"  model +{re.escape(path)} \(LlamaForCausalLM, float32, safetensors, {made_of}\)", line)
