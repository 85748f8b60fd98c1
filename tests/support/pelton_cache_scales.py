"""Caches in fp8 with scales, as engines and transformers have them: calculated from the first step, and of a checkpoint."""

import json
import math

import torch
from safetensors.torch import load_file, save_file
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.masking_utils import AttentionMaskInterface, eager_mask
from transformers.models.llama.modeling_llama import eager_attention_forward

from pelton import LLM, SamplingParams
from pelton.testing.models import make_tiny_checkpoint

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


def write_large(folder, family, **fields):
    """Values as large as `LARGE` makes them, and so much smaller behind them."""
    path = make_tiny_checkpoint(folder / family, family, **fields)
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


# Scales of a checkpoint.

PROMPT = [5, 9, 200, 31, 77, 4, 18, 250, 13, 13, 90, 2, 41, 42, 43, 44, 45, 46, 47, 48]
NAMES = {
    "vllm": "model.layers.{}.self_attn.{}_scale",
    "attn": "model.layers.{}.self_attn.attn.{}_scale",
    "products": "model.layers.{}.self_attn.{}_proj.{}_scale",
    "output": "model.layers.{}.self_attn.{}_proj.output_scale",
}
KEY, VALUE = 0.02, 0.01  # the tiny models' own keys and values reach 448 times as much


def write_checkpoint(folder, family, names, **fields):
    """A plain checkpoint, but for scales of layers 0 and 1, and keys and values as small as the scales want them."""
    path = make_tiny_checkpoint(folder / f"{family}-{names}", family, **fields)
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


def cached_in_fp8(module, query, key, value, *arguments, **named):
    scale = module.layer_idx + 1 if module.layer_idx < 2 else None
    key_scale, value_scale = (1.0, 1.0) if scale is None else (KEY * scale, VALUE * scale)
    return eager_attention_forward(
        module, query, in_e4m3(key, key_scale), in_e4m3(value, value_scale), *arguments, **named
    )


AttentionInterface.register("cached_in_fp8", cached_in_fp8)
AttentionMaskInterface.register("cached_in_fp8", eager_mask)


def expected_of_checkpoint(path):
    """Log-probabilities of the prompt's tokens with keys and values rounded in transformers."""
    config = json.loads((path / "config.json").read_text())
    config.pop("quantization_config")
    (path / "config.json").write_text(json.dumps(config))
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="cached_in_fp8").eval()
    with torch.inference_mode():
        logprobs = model(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    return [logprobs[place, token].item() for place, token in enumerate(PROMPT[1:])]


def logprobs_of(path, **settings):
    """Of the prompt's tokens."""
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
