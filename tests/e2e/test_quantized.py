"""The demo model with its file's blocks kept packed: how near its logits are, what it says, what `pelton backends` shows."""

import pytest
import torch
from pelton_pages import settings

from pelton import LLM, SamplingParams
from pelton.config import EngineConfig
from pelton.model.build import make_build_config
from pelton.model.resolve import resolve_model
from pelton.plugins import load_plugins
from pelton.testing.model_driver import ModelDriver
from pelton_plugins.commands.backends import as_text, describe

PLUGINS = load_plugins(only=[])
PROMPT = [1, 504, 3575, 282, 4649, 314, 260, 2240, 282, 260, 1194, 28, 284, 553, 1487, 355, 28, 418, 1928, 1042, 441]


def logits(dtype, **flat):
    """Of every token of the prompt, and of the same tokens one at a time at its end."""
    config = EngineConfig.from_flat(model="smollm2", **flat)
    model = resolve_model(config, PLUGINS)
    made = make_build_config(
        config, model, PLUGINS, device=torch.device("cpu"), max_num_seqs=4, max_num_batched_tokens=64
    )
    loader = PLUGINS.find("pelton_model_loaders", model.weights_format, setting="load_format").resolve()(config, model)
    driver = ModelDriver(
        hf_config=model.hf_config,
        weights=loader.weights(),
        plugins=PLUGINS,
        dtype=dtype,
        quantization=made.quantization,
    )
    together = driver.step({"a": PROMPT})["a"]
    driver.step({"b": PROMPT[:-2]})
    one_by_one = torch.cat([driver.step({"b": [token]})["b"] for token in PROMPT[-2:]])
    return together.double(), one_by_one.double()


@pytest.fixture(scope="module")
def exact():
    """Float32, the file's weights dequantized."""
    return logits(torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype, method, most",
    [
        pytest.param(torch.bfloat16, "fp8", 0.2, id="fp8-bfloat16"),
        pytest.param(torch.bfloat16, "gguf", 0.03, id="gguf-bfloat16"),  # 0.02 of it is bfloat16's own
        pytest.param(torch.float32, "gguf", 1e-3, id="gguf-float32"),
        pytest.param(torch.float32, "q8_0", 0.04, id="q8_0-float32"),  # what rounding the file's weights anew does
    ],
)
def test_logits_are_within_the_stated_tolerance(exact, dtype, method, most):
    """docs/quantization.md: the relative error of the logits, root mean square."""
    for found, wanted in zip(logits(dtype, quantization=method), exact, strict=True):
        assert (found - wanted).norm() < most * wanted.norm()
        divergence = (wanted.softmax(-1) * (wanted.log_softmax(-1) - found.log_softmax(-1))).sum(-1)
        assert divergence.mean() < (0.2 if method == "fp8" else 0.02)


def test_it_answers_as_it_does_dequantized():
    found = settings("quantization.md")
    with LLM(model="smollm2", **found, max_model_len=512, max_num_seqs=4, disable_log_stats=True) as llm:
        question = [{"role": "user", "content": "What is the capital of France?"}]
        [output] = llm.chat(question, SamplingParams(temperature=0, max_tokens=24), use_tqdm=False)
    assert "Paris" in output.outputs[0].text


def test_backends_shows_the_form_of_the_weights():
    config = EngineConfig.from_flat(model="smollm2", quantization="gguf")
    report = describe(config, PLUGINS)
    assert report["problem"] is None
    rows = {row["op"]: row for row in report["ops"]}
    for op in ("add_norm_linear", "add_norm_gated_linear", "linear"):
        assert "q4_1" in rows[op]["needs"]
    assert "q8_0" in rows["embed"]["needs"] and "q8_0" in rows["add_norm_logits"]["needs"]
    assert "q4_1" in as_text(report)
