"""Scales of a cache in fp8 that the first step finds: transformers' log-probabilities with keys and values rounded by the same scales."""

from types import SimpleNamespace

import pytest
import torch
from pelton_cache_scales import PROMPTS, difference, expected, served, typical, write_large

from pelton.config import EngineConfig
from pelton.errors import ConfigError
from pelton.testing.models import make_tiny_checkpoint
from pelton_platforms.cpu.platform import CPUPlatform
from pelton_platforms.device import cache_scales
from pelton_platforms.device.cache_scales import scale_of


@pytest.fixture
def calculated(monkeypatch):
    """What engines calculated."""
    made, make = [], cache_scales.CalculatedScales
    monkeypatch.setattr(cache_scales, "CalculatedScales", lambda *args: made.append(make(*args)) or made[-1])
    return made


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3"])
@pytest.mark.parametrize(
    "settings, num_measured",
    [({}, len(PROMPTS[0])), ({"max_num_batched_tokens": 7, "enforce_eager": True}, 7)],
    ids=["whole", "chunks"],
)
def test_the_first_steps_scales_serve_all_requests(family, settings, num_measured, calculated, tmp_path):
    path = write_large(tmp_path, family)
    ids, found = served(path, **settings)
    wanted, scales = expected(path, ids, num_measured, family in ("qwen3", "gemma3"))
    (made,) = calculated
    assert [(layer.key.item(), layer.value.item()) for layer in made.layers.values()] == [
        scales[i] for i in sorted(scales)
    ]
    assert max(value for _, value in scales.values()) > 1
    assert difference(found, wanted) < 1e-2  # where a number lies between two of e4m3; most are 1e-5 apart
    assert typical(found, wanted) < 1e-4
    assert not made.is_due
    _, without = served(path, calculate_kv_scales=False, **settings)
    assert difference(without, wanted) > 0.05, "values do not fit without scales"


def test_a_runner_that_lists_kernels_leaves_no_scales(calculated, tmp_path, monkeypatch):
    """GPUs make one before the real one; its scales stayed on the layers, and never were set."""
    monkeypatch.setattr(CPUPlatform, "compile_soon", lambda self, run: bool(run()))
    path = write_large(tmp_path, "llama")
    ids, found = served(path)
    wanted, scales = expected(path, ids, len(PROMPTS[0]), has_norms=False)
    listed, made = calculated
    assert listed.is_due and not made.is_due
    assert [layer.value.item() for layer in made.layers.values()] == [scales[i][1] for i in sorted(scales)]
    assert difference(found, wanted) < 1e-2


@pytest.mark.parametrize(
    "numbers, scale",
    [([0.0], 2**-6), ([1e-9, -1e-3], 2**-6), ([224.0], 1.0), ([-225.0, 3.0], 2.0), ([448.0], 2.0), ([7.0], 2**-5)],
)
def test_scales_are_powers_of_two_with_room_above(numbers, scale):
    assert scale_of(torch.tensor(numbers)).item() == scale


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"kv_cache_dtype": "auto"}, "calculate_kv_scales is set, and kv_cache_dtype is 'auto'"),
        ({"kv_connector": "shared_storage"}, "beside kv_connector"),
    ],
)
def test_what_has_no_scales_is_refused(settings, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        served(make_tiny_checkpoint(tmp_path / "m", "llama"), **settings)


@pytest.mark.parametrize(
    "fields, layers, message",
    [
        ({}, {"model.layers.0.attn": object()}, "model.layers.0.attn keeps latents or states, which have no scales"),
        ({"pipeline_parallel_size": 2}, {}, "pipeline_parallel_size is 2; served is 1"),
    ],
)
def test_layers_and_stages_without_scales_are_refused(fields, layers, message):
    config = EngineConfig.from_flat(kv_cache_dtype="fp8", calculate_kv_scales=True, **fields)
    loaded = SimpleNamespace(config=config, build=SimpleNamespace(cache_layers=layers), device=torch.device("cpu"))
    with pytest.raises(ConfigError, match=message):
        cache_scales.make_calculated_scales(loaded)


def test_scales_of_the_checkpoint_stay(calculated, tmp_path):
    """A layer that has them already is left alone."""
    from pelton_plugins.quantization.cache_scales import Scaling

    path = write_large(tmp_path, "llama")
    register = cache_scales.make_calculated_scales

    def with_one(loaded):
        first = next(iter(loaded.build.cache_layers.values()))
        Scaling(first, torch.ones((first.num_heads + 2 * first.num_kv_heads) * first.head_dim), 1.0)
        return register(loaded)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pelton_platforms.device.cache_scales.make_calculated_scales", with_one)
        served(path)
    (made,) = calculated
    assert made.layers and not any(name.startswith("model.layers.0.") for name in made.layers)
