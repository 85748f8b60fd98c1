"""A checkpoint's scales for a cache in fp8 are heeded, and never dropped in silence."""

import pytest
import torch
from pelton_cache_scales import NAMES, expected_of_checkpoint, logprobs_of, write_checkpoint

from pelton.errors import ConfigError
from pelton.testing.model_driver import TensorWeight, make_test_build
from pelton_plugins.quantization.cache_scales import check_scheme, take_cache_scales


@pytest.mark.parametrize(
    "family, names", [("llama", "vllm"), ("llama", "attn"), ("qwen3", "products"), ("qwen2", "output")]
)
def test_keys_and_values_are_kept_by_the_checkpoints_scales(tmp_path, family, names):
    """Whole, and in chunks that read the cache of earlier ones."""
    path = write_checkpoint(tmp_path, family, names)
    got = [logprobs_of(path, kv_cache_dtype="fp8", **more) for more in ({}, {"max_num_batched_tokens": 7})]
    plain = logprobs_of(path)
    wanted = expected_of_checkpoint(path)
    for found in got:
        assert max(abs(a - b) for a, b in zip(found, wanted, strict=True)) < 2e-3
    assert max(abs(a - b) for a, b in zip(plain, wanted, strict=True)) > 5e-3, "the cache is rounded"


def load(kv_dtype, name, scale):
    build = make_test_build({}, kv_dtype=kv_dtype)
    for _ in range(2):  # each matrix asks for it
        take_cache_scales(build)
    build.weights.load([(name, TensorWeight(torch.tensor(scale)))])


@pytest.mark.parametrize("names", NAMES)
@pytest.mark.parametrize(
    "scale, shown", [([0.0], "0"), ([-1.0], "-1"), ([float("nan")], "nan"), ([0.5, 0.25], "2 numbers")]
)
def test_a_scale_that_is_none_is_refused(names, scale, shown):
    name = NAMES[names].format(0, "v", "v")
    load("auto", name, scale)
    with pytest.raises(ConfigError, match=f"has {name} {shown}; a cache in fp8 takes one number above 0 for a layer"):
        load("fp8_e5m2", name, scale)


def test_other_names_are_still_unexpected():
    with pytest.raises(ConfigError, match=r"unexpected model\.layers\.0\.self_attn\.o_scale"):
        load("auto", "model.layers.0.self_attn.o_scale", [1.0])


@pytest.mark.parametrize(
    "field, value", [("type", "int"), ("num_bits", 4), ("strategy", "attn_head"), ("dynamic", True)]
)
def test_another_scheme_of_the_cache_is_refused(field, value):
    check_scheme("auto", {field: value})
    check_scheme("fp8", {"type": "float", "num_bits": 8, "observer": "minmax"})
    with pytest.raises(
        ConfigError, match=rf"kv_cache_scheme has {field} {value!r}, and kv_cache_dtype is 'fp8'; served is"
    ):
        check_scheme("fp8", {field: value})
