"""Scales of a cache in fp8 that the first step finds: transformers' log-probabilities with keys and values rounded by the same scales."""

import math
from types import SimpleNamespace

import pytest
import torch
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.masking_utils import AttentionMaskInterface, eager_mask
from transformers.models.llama.modeling_llama import eager_attention_forward

from pelton import LLM, SamplingParams
from pelton.config import EngineConfig
from pelton.errors import ConfigError
from pelton.testing.models import make_tiny_checkpoint
from pelton_platforms.device import cache_scales
from pelton_platforms.device.cache_scales import scale_of

PROMPTS = [
    [5, 9, 200, 31, 77, 4, 18, 250, 13, 13, 90, 2, 41, 42, 43, 44, 45, 46, 47, 48],
    [7, 100, 101, 3, 99, 98, 12, 1, 66],
]
NUM_TOKENS = 8
LARGE = 400.0
"""What values are multiplied by here: without scales they would not fit."""


class Rounded:
    """transformers' attention with what a cache in e4m3 holds; scales are those of the first so many tokens of the first call."""

    def __init__(self, num_measured, has_norms):
        self.num_measured, self.has_norms = num_measured, has_norms
        self.scales = {}

    def __call__(self, module, query, key, value, *arguments, **named):
        if module.layer_idx not in self.scales:
            first, second = key[:, :, : self.num_measured].chunk(2, dim=-1)
            largest = torch.hypot(first, second).amax().item(), value[:, :, : self.num_measured].abs().amax().item()
            scales = [2.0 ** math.ceil(math.log2(max(one / 224, 2.0**-6))) for one in largest]
            self.scales[module.layer_idx] = (1.0 if self.has_norms else scales[0], scales[1])
        scales = self.scales[module.layer_idx]
        key, value = (in_e4m3(x, scale) for x, scale in zip((key, value), scales, strict=True))
        return eager_attention_forward(module, query, key, value, *arguments, **named)


def in_e4m3(x, scale):
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


def enlarge(model_or_tensors, factor):
    for name, tensor in model_or_tensors:
        if name.endswith("v_proj.weight"):
            tensor.data.mul_(factor)
        if name.endswith("o_proj.weight"):
            tensor.data.div_(factor)


def write(folder, family):
    """Values as large as `LARGE` makes them, and so much smaller behind them."""
    path = make_tiny_checkpoint(folder / family, family)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    enlarge(model.named_parameters(), LARGE)
    model.save_pretrained(path)
    return path


def expected(path, outputs, num_measured, has_norms):
    """Of each prompt with its continuation, the log-probability of each token behind the first; the scales."""
    rounded = Rounded(num_measured, has_norms)
    AttentionInterface.register("measured_fp8", rounded)
    AttentionMaskInterface.register("measured_fp8", eager_mask)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="measured_fp8").eval()
    found = []
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        ids = prompt + output
        with torch.inference_mode():
            logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        found.append([logprobs[place, token].item() for place, token in enumerate(ids[1:])])
    return found, rounded.scales


def served(path, **settings):
    """Ids and the log-probabilities, one request after the other."""
    made = {
        "dtype": "float32", "device": "cpu", "skip_tokenizer_init": True, "kv_cache_memory_bytes": 2**22, "disable_log_stats": True,
        "kv_cache_dtype": "fp8", "calculate_kv_scales": True,
    }  # fmt: skip
    ids, values = [], []
    params = SamplingParams(
        max_tokens=NUM_TOKENS, temperature=0.0, prompt_logprobs=0, logprobs=0, detokenize=False, ignore_eos=True
    )
    with LLM(str(path), **(made | settings)) as llm:
        for prompt in PROMPTS:
            (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
            assert output.error is None, output.error
            own = list(output.outputs[0].token_ids)
            steps = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
            ids.append(own)
            values.append([step[token].logprob for step, token in zip(steps, prompt[1:] + own, strict=True)])
    return ids, values


def difference(found, wanted):
    return max(abs(a - b) for one, other in zip(found, wanted, strict=True) for a, b in zip(one, other, strict=True))


def typical(found, wanted):
    pairs = [abs(a - b) for one, other in zip(found, wanted, strict=True) for a, b in zip(one, other, strict=True)]
    return sorted(pairs)[len(pairs) // 2]


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
    path = write(tmp_path, family)
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
    "device, fields, layers, message",
    [
        ("cuda", {}, {}, "the device is cuda; in this version scales are calculated on CPUs alone"),
        (
            "cpu",
            {},
            {"model.layers.0.attn": object()},
            "model.layers.0.attn keeps latents or states, which have no scales",
        ),
        ("cpu", {"pipeline_parallel_size": 2}, {}, "pipeline_parallel_size is 2; served is 1"),
    ],
)
def test_devices_layers_and_stages_without_scales_are_refused(device, fields, layers, message):
    config = EngineConfig.from_flat(kv_cache_dtype="fp8", calculate_kv_scales=True, **fields)
    loaded = SimpleNamespace(config=config, build=SimpleNamespace(cache_layers=layers), device=torch.device(device))
    with pytest.raises(ConfigError, match=message):
        cache_scales.make_calculated_scales(loaded)


def test_scales_of_the_checkpoint_stay(calculated, tmp_path):
    """A layer that has them already is left alone."""
    from pelton_plugins.quantization.cache_scales import Scaling

    path = write(tmp_path, "llama")
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
