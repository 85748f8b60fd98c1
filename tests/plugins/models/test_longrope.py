"""LongRoPE of Phi-3: logits are those of transformers up to the original length, and beyond it."""

import pytest
import torch

from pelton.errors import ConfigError
from pelton.testing.model_driver import ModelDriver
from pelton.testing.models import load_reference, make_tiny_checkpoint, reference_logits

PARAMETERS = {
    "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32, "partial_rotary_factor": 0.5,
    "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 3.0, 5.0, 7.0],
}  # fmt: skip
FIELDS = {"original_max_position_embeddings": 32, "partial_rotary_factor": 0.5, "sliding_window": None}


@pytest.mark.parametrize("length", [32, 80])
def test_logits_equal_transformers(length, tmp_path, model_plugins):
    path = make_tiny_checkpoint(tmp_path, "phi3", with_tokenizer=False, rope_parameters=dict(PARAMETERS), **FIELDS)
    tokens = [(7 * index) % 300 + 3 for index in range(length)]
    driver = ModelDriver(path, plugins=model_plugins, max_model_len=length)
    want = reference_logits(load_reference(path), tokens)
    got = torch.cat([driver.step({"a": tokens[:20]})["a"], driver.step({"a": tokens[20:]})["a"]])
    torch.testing.assert_close(got, want, atol=2e-4, rtol=1e-4)


def test_a_wrong_number_of_factors_is_named(tmp_path, model_plugins):
    path = make_tiny_checkpoint(tmp_path, "phi3", with_tokenizer=False, rope_parameters=dict(PARAMETERS), **FIELDS)
    wrong = {**PARAMETERS, "long_factor": [1.0, 2.0]}
    with pytest.raises(ConfigError, match=r"long_factor has 2 numbers; a head's 8 turned ones take 4"):
        ModelDriver(path, plugins=model_plugins, hf_overrides={"rope_parameters": wrong})
