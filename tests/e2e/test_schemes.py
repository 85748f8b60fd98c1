"""Dense models in every form of integers and of nf4 that checkpoints have: the ids of transformers in float32 whose matrices are what the
numbers say, alone, batched, in chunks, with hits of the prefix cache and after preemption."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from pelton_e2e import generate, greedy, greedy_reference, make_llm, make_prompts
from pelton_grouped import Form, bitsandbytes_tensors, grouped_tensors, int_quantized_tensors, nf4_tensors
from safetensors.torch import load_file, save_file

from pelton.testing.models import VOCAB_SIZE, make_tiny_checkpoint

NUM_TOKENS = 16
LENGTHS = (1, 17, 40)
FORMS = {
    "awq": Form("awq"),
    "gptq": Form("gptq", is_symmetric=True),
    "gptq-8": Form("gptq", 8, -1, is_symmetric=True),
    "packed": Form("compressed-tensors", is_symmetric=True),
    "packed-zeros": Form("compressed-tensors"),
}
INT8 = {
    "quant_method": "compressed-tensors", "format": "int-quantized", "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"], "weights": {"type": "int", "num_bits": 8, "strategy": "channel", "symmetric": True},
        },
    },
}  # fmt: skip
IN_4_BITS = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
CASES: dict[str, tuple[dict[str, Any], Any]] = {
    **{name: (form.config, grouped_tensors(form)) for name, form in FORMS.items()},
    "int-quantized": (INT8, int_quantized_tensors),
    "bitsandbytes-int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, bitsandbytes_tensors),
    "bitsandbytes-nf4": (IN_4_BITS, nf4_tensors()),
    "bitsandbytes-nf4-double": (IN_4_BITS | {"bnb_4bit_use_double_quant": True}, nf4_tensors(is_double=True)),
}


def write_both(folder: Path, settings: dict[str, Any], make: Any) -> tuple[str, str]:
    """The checkpoint in integers, and one that has what they say."""
    plain, packed = folder / "plain", folder / "packed"
    make_tiny_checkpoint(
        plain, "llama", with_tokenizer=False, hidden_size=128, intermediate_size=192, head_dim=32, num_hidden_layers=2
    )
    shutil.copytree(plain, packed)
    tensors = load_file(plain / "model.safetensors")
    small = dict(tensors)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        found, said = make(name.removesuffix(".weight"), small.pop(name).float())
        small |= {key: part.contiguous() for key, part in found.items()}
        tensors[name] = said.contiguous()
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    save_file(small, packed / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((packed / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    return str(plain), str(packed)


@pytest.mark.parametrize("case", CASES)
def test_ids_are_those_of_transformers_with_the_dequantized_matrices(case: str, tmp_path: Path) -> None:
    plain, packed = write_both(tmp_path, *CASES[case])
    prompts = make_prompts(VOCAB_SIZE, LENGTHS)
    want, _ = greedy_reference(plain, prompts, NUM_TOKENS)
    params = greedy(NUM_TOKENS)
    with make_llm(packed) as llm:
        assert generate(llm, prompts, params) == want
        again = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        assert [list(output.outputs[0].token_ids) for output in again] == want
        assert sum(output.num_cached_tokens or 0 for output in again) >= 48
    with make_llm(packed, max_num_seqs=1, enforce_eager=True) as llm:
        assert generate(llm, prompts, params) == want
    with make_llm(packed, max_num_batched_tokens=16, max_model_len=64, num_gpu_blocks_override=7) as llm:
        assert generate(llm, prompts, params) == want
        assert llm.num_preemptions() > 0
