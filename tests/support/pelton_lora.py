"""Adapters that PEFT makes on tiny checkpoints, and what PEFT's merged weights answer."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from pelton_e2e import greedy_with_gaps

LLAMA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def make_adapter(
    folder: str | Path,
    checkpoint: str | Callable[[], Any],
    *,
    seed: int = 1,
    rank: int = 8,
    strength: float = 0.1,
    **config: Any,
) -> Any:
    """Save a random adapter of the checkpoint, or of the model that is made; returns PEFT's model with its weights merged."""
    import torch
    from peft import LoraConfig, get_peft_model

    from pelton.testing.models import load_reference

    settings: dict[str, Any] = {"r": rank, "lora_alpha": 2 * rank, "target_modules": list(LLAMA_TARGETS)}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        base = load_reference(checkpoint) if isinstance(checkpoint, str) else checkpoint()
        model = get_peft_model(base, LoraConfig(**(settings | config)))
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "lora_" in name:
                    weight.normal_(0.0, strength)
    model.save_pretrained(str(folder))
    return model.merge_and_unload().eval()


def greedy_with_gap(model: Any, prompts: list[list[int]], num_tokens: int) -> tuple[list[list[int]], float]:
    """Greedy ids of each prompt, and the smallest gap between the best two logits."""
    is_alone = getattr(model.config, "attention_chunk_size", None) is not None
    outputs, gaps = greedy_with_gaps(model, prompts, num_tokens, is_alone=is_alone)
    return outputs, min(min(row) for row in gaps)


def merged_checkpoint(
    folder: Path,
    checkpoint: str,
    *,
    seed: int,
    rank: int,
    strength: float = 0.1,
    targets: Collection[str] = LLAMA_TARGETS,
) -> tuple[str, str]:
    """A random adapter of every matrix whose name ends like one of `targets`, and the checkpoint with it merged: their folders. Needs no
    PEFT."""
    import json
    import shutil

    import torch
    from safetensors.torch import load_file, save_file

    merged = folder / "merged"
    shutil.copytree(checkpoint, merged)
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for path in merged.glob("*.safetensors"):
        weights = load_file(path)
        for name, weight in weights.items():
            module = name.removesuffix(".weight")
            if weight.dim() == 2 and f".{module}".endswith(tuple(f".{target}" for target in targets)):
                a = torch.randn(rank, weight.shape[1], generator=generator) * strength
                b = torch.randn(weight.shape[0], rank, generator=generator) * strength
                weights[name] = (weight.float() + 2.0 * (b @ a)).to(weight.dtype)
                full = f"base_model.model.{module}"
                tensors |= {f"{full}.lora_A.weight": a, f"{full}.lora_B.weight": b}
        save_file(weights, path, metadata={"format": "pt"})
    assert tensors
    adapter = folder / "adapter"
    adapter.mkdir()
    save_file(tensors, adapter / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(targets)}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    return str(adapter), str(merged)
