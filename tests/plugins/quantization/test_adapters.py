"""Adapters on quantized models: the base product is the quantized matrix's, an adapter's part is computed from the inputs as they are.

PEFT is the oracle, on transformers' model in float32 whose matrices are what the quantized ones say.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pelton_grouped import Form, quantize, tensors_of
from pelton_lora import LLAMA_TARGETS
from safetensors.torch import load_file, save_file

from pelton import LLM, LoRARequest, SamplingParams
from pelton.ops import packed_blocks
from pelton.testing.models import load_reference, make_tiny_checkpoint
from pelton_plugins.weight_forms import block_writing

PROMPT = [5, 9, 200, 31, 77, 4, 18, 250, 13, 13, 90, 2]
SIZES = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32}
E4M3 = torch.float8_e4m3fn
SETTINGS = {
    "max_model_len": 64, "max_num_seqs": 4, "kv_cache_memory_bytes": 2**22, "dtype": "float32", "skip_tokenizer_init": True,
    "disable_log_stats": True, "enable_lora": True, "enable_prefix_caching": False,
}  # fmt: skip

Weights = dict[str, torch.Tensor]


def is_matrix(name: str) -> bool:
    return name.endswith("_proj.weight")


def write(path: Path, config: dict[str, Any], make: Callable[[torch.Tensor], tuple[Weights, torch.Tensor]]) -> Weights:
    """Quantize a checkpoint in place. make: from a matrix to its tensors by their suffix, and to what they say; returns the latter."""
    (file,) = path.glob("*.safetensors")
    tensors, says = {}, {}
    for name, tensor in load_file(file).items():
        if not is_matrix(name):
            tensors[name] = tensor
            continue
        made, says[name] = make(tensor.float())
        tensors |= {f"{name.removesuffix('.weight')}.{suffix}": part.contiguous() for suffix, part in made.items()}
    fields = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(fields | {"quantization_config": config}))
    save_file(tensors, file, metadata={"format": "pt"})
    return says


def in_groups(form: Form) -> Callable[[Path], Weights]:
    def make(weight: torch.Tensor) -> tuple[Weights, torch.Tensor]:
        made = quantize(weight, form, 0)
        return tensors_of(made, form), made.weight

    return lambda path: write(path, form.config, make)


def of_bytes(path: Path) -> Weights:
    """bitsandbytes' int8."""

    def make(weight: torch.Tensor) -> tuple[Weights, torch.Tensor]:
        largest = weight.abs().amax(1)
        codes = (weight / largest[:, None] * 127).round()
        kept = {"weight": codes.to(torch.int8), "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
        return kept, codes * largest[:, None] / 127

    return write(path, {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_skip_modules": None}, make)


def as_it_loads(round_matrix: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], Weights]:
    def says(path: Path) -> Weights:
        (file,) = path.glob("*.safetensors")
        return {name: round_matrix(tensor.float()) for name, tensor in load_file(file).items() if is_matrix(name)}

    return says


def in_blocks(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    kind = packed_blocks.KINDS[name]

    def rounded(weight: torch.Tensor) -> torch.Tensor:
        panels = torch.empty(packed_blocks.panels_shape(kind, *weight.shape), dtype=torch.uint8)
        block_writing.pack(block_writing.quantize(weight, kind), kind, panels)
        return packed_blocks.dequantize(panels, kind, weight.shape[0])

    return rounded


def e4m3_rows(x: torch.Tensor) -> torch.Tensor:
    scale = x.abs().amax(-1, keepdim=True) / 448
    return (x * (1.0 / scale)).clamp(-448, 448).to(E4M3).float() * scale


BASES: dict[str, tuple[dict[str, Any], Callable[[Path], Weights], float]] = {
    # settings, what writes or says the matrices, and the largest error beside what the adapter changes
    "awq": ({}, in_groups(Form("awq")), 0.02),
    "gptq": ({}, in_groups(Form("gptq", is_symmetric=True)), 0.02),
    "gptq-ordered": ({}, in_groups(Form("gptq", 4, 32, is_ordered=True)), 0.02),
    "gptq-8": ({}, in_groups(Form("gptq", 8, -1, is_symmetric=True)), 0.02),
    "compressed-tensors": ({}, in_groups(Form("compressed-tensors", is_symmetric=True)), 0.02),
    "bitsandbytes": ({}, of_bytes, 0.02),
    "q8_0": ({"quantization": "q8_0"}, as_it_loads(in_blocks("q8_0")), 0.1),  # the vocabulary is rounded too
    "q4_1": ({"quantization": "q4_1"}, as_it_loads(in_blocks("q4_1")), 0.1),
    "fp8": ({"quantization": "fp8"}, as_it_loads(e4m3_rows), 0.1),  # an input between two numbers goes to either
}


def logprobs_of(model: Any) -> torch.Tensor:
    """Of each token of the prompt but the first."""
    with torch.inference_mode():
        logits = model(torch.tensor([PROMPT])).logits[0].float()
    return logits.log_softmax(-1)[:-1].gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0]


def oracle(twin: Path, says: Weights, adapter: Path, *, rounds_inputs: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(without, with) a random adapter, which is saved."""
    from peft import LoraConfig, get_peft_model

    model = load_reference(str(twin))
    for name, weight in says.items():
        model.get_parameter(name).data = weight
        if rounds_inputs:
            module = model.get_submodule(name.removesuffix(".weight"))
            module.register_forward_pre_hook(lambda module, args: (e4m3_rows(args[0]),))
    base = logprobs_of(model)
    torch.manual_seed(3)
    adapted = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules=list(LLAMA_TARGETS)))
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_" in name:
                weight.normal_(0.0, 0.05)
    adapted.save_pretrained(str(adapter))
    return base, logprobs_of(adapted.eval())


@pytest.mark.parametrize("base", BASES)
def test_adapters_add_to_what_the_quantized_matrices_give(base: str, tmp_path: Path) -> None:
    settings, quantized, most = BASES[base]
    path, twin = (
        make_tiny_checkpoint(tmp_path / name, "llama", with_tokenizer=False, **SIZES) for name in ("m", "twin")
    )
    says = quantized(path)
    without, with_adapter = oracle(twin, says, tmp_path / "adapter", rounds_inputs=base == "fp8")
    params = SamplingParams(max_tokens=2, temperature=0.0, prompt_logprobs=0, ignore_eos=True)
    request = LoRARequest("mine", 1, str(tmp_path / "adapter"))
    with LLM(model=str(path), **SETTINGS, **settings) as llm:
        outputs = llm.generate(
            [{"prompt_token_ids": PROMPT}] * 4, params, use_tqdm=False, lora_request=[None, request, None, request]
        )
    found = [
        torch.tensor([at[token].logprob for at, token in zip(one.prompt_logprobs[1:], PROMPT[1:], strict=True)])
        for one in outputs
    ]
    apart = (with_adapter - without).norm()
    assert apart > 1.0
    for got, want in zip(found, [without, with_adapter] * 2, strict=True):
        assert (got - want).norm() < most * apart
