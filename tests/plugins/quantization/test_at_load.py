"""Methods that quantize at load: what they make of a model, and what they refuse."""

import json
from functools import partial

import pytest
import torch
from pelton_ranks import run_ranks

from pelton.builtin import pelton_fused_ops
from pelton.errors import ConfigError
from pelton.ops.packed_blocks import KINDS, dequantize, panels_shape
from pelton.ops.selector import OpSelector
from pelton.parallel.context import ParallelContext
from pelton.plugins import load_plugins
from pelton.testing.model_driver import ModelDriver, TensorWeight, checkpoint_weights
from pelton.testing.models import make_tiny_checkpoint
from pelton_plugins.quantization.at_load import Q8Weights, Q40Weights, Q41Weights
from pelton_plugins.weight_forms.block_writing import pack, quantize

METHODS = {"q8_0": Q8Weights, "q4_0": Q40Weights, "q4_1": Q41Weights}
PROMPT = [5, 9, 200, 31, 77, 4, 18]


def reference_only():
    """The torch references alone."""
    entries = load_plugins(only=[]).entries("pelton_ops", device_type="cpu")
    return OpSelector([entry for entry in entries if entry.name.startswith("reference.")], pelton_fused_ops())


def driver(path, method=None, **fields):
    chosen = {} if method is None else {"quantization": METHODS[method](None, None)}
    return ModelDriver(path, ops=reference_only(), **chosen, **fields)


@pytest.fixture(scope="module", params=["llama", "qwen2", "gemma3", "phi3"])
def checkpoint(request, tmp_path_factory):
    return make_tiny_checkpoint(tmp_path_factory.mktemp("quant") / request.param, request.param)


@pytest.mark.parametrize("method", METHODS)
def test_logits_are_those_of_the_dequantized_weights(checkpoint, method, tmp_path):
    quantized = driver(checkpoint, method)
    logits = quantized.step({"a": PROMPT})["a"]
    matrices = {}
    for module in quantized.model.modules():
        for name, place in getattr(module, "_parameters", {}).items():
            if name.startswith("part"):
                assert place.dtype == torch.uint8
                matrices[id(module)] = module
    assert len(matrices) >= 4
    plain = driver(checkpoint, weights=rounded(checkpoint, method))
    torch.testing.assert_close(logits, plain.step({"a": PROMPT})["a"], rtol=1e-5, atol=1e-4)


def rounded(path, method):
    """The checkpoint with every matrix as the method keeps it."""
    for name, weight in checkpoint_weights(path):
        tensor = weight.read()
        if tensor.dim() == 2:
            kind = KINDS["q8_0" if "embed_tokens" in name or "lm_head" in name else method]
            panels = torch.empty(panels_shape(kind, *tensor.shape), dtype=torch.uint8)
            pack(quantize(tensor, kind), kind, panels)
            tensor = dequantize(panels, kind, tensor.shape[0])
        yield name, TensorWeight(tensor)


def test_int8_is_near_the_model_itself(checkpoint):
    exact = driver(checkpoint).step({"a": PROMPT})["a"]
    near = driver(checkpoint, "q8_0").step({"a": PROMPT})["a"]
    assert (near - exact).norm() < 0.03 * exact.norm()


def test_memory_is_what_the_blocks_take(checkpoint):
    def bytes_of(run):
        return sum(p.numel() * p.element_size() for p in run.model.parameters() if p.dim() > 1)

    plain = bytes_of(driver(checkpoint, dtype=torch.bfloat16))
    assert bytes_of(driver(checkpoint, "q8_0", dtype=torch.bfloat16)) == pytest.approx(plain * 34 / 64, rel=0.01)
    assert bytes_of(driver(checkpoint, "q4_0", dtype=torch.bfloat16)) < 0.45 * plain


def test_large_matrices_are_packed_a_part_at_a_time(tmp_path, monkeypatch):
    from pelton_plugins.weight_forms import packed

    path = make_tiny_checkpoint(tmp_path / "m", "llama")
    whole = driver(path, "q4_1").step({"a": PROMPT})["a"]
    monkeypatch.setattr(packed, "NUMBERS_AT_ONCE", 64 * 40)  # 32 rows
    assert torch.equal(driver(path, "q4_1").step({"a": PROMPT})["a"], whole)


@pytest.mark.parametrize("method", ["q8_0", "q4_1"])
def test_two_ranks_hold_parts_of_the_blocks_of_one(tmp_path, method):
    """A vocabulary of 321 rows leaves padding on the second rank."""
    path = make_tiny_checkpoint(tmp_path / "m", "qwen2", intermediate_size=128, vocab_size=321, with_tokenizer=False)
    whole = driver(path, method)
    want = whole.step({"a": PROMPT})["a"]
    results, ranks = run_ranks(2, partial(driver, method=method), path, [PROMPT])
    for got in results:
        torch.testing.assert_close(got, want, atol=2e-2, rtol=2e-2)  # inputs are rounded to 8 bits in other groups
    held = [sum(p.numel() for p in d.model.parameters() if p.dtype == torch.uint8) for d in (whole, ranks[1])]
    assert held[0] / 2 <= held[1] < 0.55 * held[0]


def test_a_rank_s_part_of_a_block_is_refused(checkpoint):
    with pytest.raises(
        ConfigError, match=r"down_proj has 96 columns of which this rank has \[0, 48\); .* multiple of 32"
    ):
        driver(checkpoint, "q8_0", parallel=ParallelContext(0, 2))


def test_a_width_that_blocks_do_not_divide_is_named(tmp_path):
    path = make_tiny_checkpoint(tmp_path / "m", "llama", intermediate_size=100)
    with pytest.raises(
        ConfigError, match=r"'q4_1', and model.layers.0.mlp.down_proj has 100 columns; .* multiple of 32"
    ):
        driver(path, "q4_1")


def test_a_missing_weight_is_still_named(tmp_path):
    path = make_tiny_checkpoint(tmp_path / "m", "llama")
    fields = json.loads((path / "config.json").read_text())
    weights = [pair for pair in checkpoint_weights(path) if "layers.1.mlp.up_proj" not in pair[0]]
    with pytest.raises(ConfigError, match=r"missing model.layers.1.mlp.up_proj.weight"):
        ModelDriver(hf_config=fields, weights=weights, ops=reference_only(), quantization=Q8Weights(None, None))
