"""A checkpoint's scales for a cache in fp8 are heeded, and never dropped in silence."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.masking_utils import AttentionMaskInterface, eager_mask
from transformers.models.llama.modeling_llama import eager_attention_forward

from pelton import LLM, SamplingParams
from pelton.errors import ConfigError
from pelton.testing.model_driver import TensorWeight, make_test_build
from pelton.testing.models import make_tiny_checkpoint
from pelton_plugins.quantization.cache_scales import check_scheme, take_cache_scales

PROMPT = [5, 9, 200, 31, 77, 4, 18, 250, 13, 13, 90, 2, 41, 42, 43, 44, 45, 46, 47, 48]
NAMES = {
    "vllm": "model.layers.{}.self_attn.{}_scale",
    "attn": "model.layers.{}.self_attn.attn.{}_scale",
    "products": "model.layers.{}.self_attn.{}_proj.{}_scale",
    "output": "model.layers.{}.self_attn.{}_proj.output_scale",
}
KEY, VALUE = 0.02, 0.01  # the tiny models' own keys and values reach 448 times as much


def write_checkpoint(folder, family, names):
    """A plain checkpoint, but for scales of layers 0 and 1, and keys and values as small as the scales want them."""
    path = make_tiny_checkpoint(folder / f"{family}-{names}", family)
    (file,) = path.glob("*.safetensors")
    tensors = load_file(file)
    for layer in (0, 1):
        for what, scale in (("k", KEY), ("v", VALUE)):
            tensors[NAMES[names].format(layer, what, what)] = torch.tensor([scale * (layer + 1)])
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    scheme = {"type": "float", "num_bits": 8, "symmetric": True, "strategy": "tensor", "dynamic": False}
    settings = {"quant_method": "compressed-tensors", "config_groups": {}, "ignore": [], "kv_cache_scheme": scheme}
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return path


def rounded(x, scale):
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


def cached_in_fp8(module, query, key, value, *arguments, **named):
    scale = module.layer_idx + 1 if module.layer_idx < 2 else None
    key_scale, value_scale = (1.0, 1.0) if scale is None else (KEY * scale, VALUE * scale)
    return eager_attention_forward(
        module, query, rounded(key, key_scale), rounded(value, value_scale), *arguments, **named
    )


AttentionInterface.register("cached_in_fp8", cached_in_fp8)
AttentionMaskInterface.register("cached_in_fp8", eager_mask)


def expected(path):
    """Log-probabilities of the prompt's tokens, and the next ids, with keys and values rounded in transformers."""
    config = json.loads((path / "config.json").read_text())
    config.pop("quantization_config")
    (path / "config.json").write_text(json.dumps(config))
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="cached_in_fp8").eval()
    with torch.inference_mode():
        logprobs = model(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    return [logprobs[place, token].item() for place, token in enumerate(PROMPT[1:])]


def logprobs_of(path, **settings):
    made = {
        "dtype": "float32",
        "device": "cpu",
        "skip_tokenizer_init": True,
        "kv_cache_memory_bytes": 2**22,
        "disable_log_stats": True,
    }
    with LLM(str(path), **(made | settings)) as llm:
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
        (output,) = llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
        assert output.error is None, output.error
    return [one[token].logprob for one, token in zip(output.prompt_logprobs[1:], PROMPT[1:], strict=True)]


@pytest.mark.parametrize(
    "family, names", [("llama", "vllm"), ("llama", "attn"), ("qwen3", "products"), ("qwen2", "output")]
)
def test_keys_and_values_are_kept_by_the_checkpoints_scales(tmp_path, family, names):
    """Whole, and in chunks that read the cache of earlier ones."""
    path = write_checkpoint(tmp_path, family, names)
    got = [logprobs_of(path, kv_cache_dtype="fp8", **more) for more in ({}, {"max_num_batched_tokens": 7})]
    plain = logprobs_of(path)
    wanted = expected(path)
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
