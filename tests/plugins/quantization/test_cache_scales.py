"""A checkpoint's scales for a cache in fp8 are never dropped in silence."""

import pytest
import torch

from pelton.errors import ConfigError
from pelton.testing.model_driver import TensorWeight, make_test_build
from pelton_plugins.quantization.cache_scales import check_cache_scales

NAMES = [
    "model.layers.0.self_attn.k_scale",
    "model.layers.0.self_attn.attn.v_scale",
    "model.layers.0.self_attn.k_proj.output_scale",
]


def load(kv_dtype, name, scale):
    build = make_test_build({}, kv_dtype=kv_dtype)
    for _ in range(2):  # each matrix asks for it
        check_cache_scales(build)
    build.weights.load([(name, TensorWeight(torch.tensor([scale])))])


@pytest.mark.parametrize("name", NAMES)
def test_scales_of_a_cache_are_refused_where_they_would_count(name):
    load("auto", name, 0.5)
    load("fp8", name, 1.0)
    with pytest.raises(
        ConfigError, match=rf"kv_cache_dtype is 'fp8_e5m2', and the checkpoint has {name} 0\.5: .* without scales"
    ):
        load("fp8_e5m2", name, 0.5)


def test_other_names_are_still_unexpected():
    with pytest.raises(ConfigError, match=r"unexpected model\.layers\.0\.self_attn\.o_scale"):
        load("auto", "model.layers.0.self_attn.o_scale", 1.0)
