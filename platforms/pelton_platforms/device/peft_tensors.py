"""The tensors of an adapter as PEFT saves them: adapter_model.safetensors, or adapter_model.bin."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from pelton.lora.peft import WEIGHT_NAMES, invalid_adapter

_PREFIX = "base_model.model."


def read_tensors(folder: str | os.PathLike[str], shown: str) -> dict[str, Tensor]:
    """All tensors by name. Raises `InvalidAdapterError`."""
    safetensors, pickled = (Path(folder) / name for name in WEIGHT_NAMES)
    if safetensors.is_file():
        try:
            return load_file(safetensors)
        except (SafetensorError, OSError) as error:
            raise invalid_adapter(shown, f"{safetensors.name} cannot be read: {error}") from None
    try:
        found = torch.load(pickled, map_location="cpu", weights_only=True)
    except Exception as error:  # pickle's, zip's and torch's own, by what is wrong with the file
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise invalid_adapter(shown, f"{pickled.name} cannot be read as tensors alone: {why}") from None
    if not isinstance(found, dict) or not all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in found.items()
    ):
        raise invalid_adapter(shown, f"{pickled.name} holds something other than tensors by name")
    return found


def split_name(tensor_name: str, shown: str) -> tuple[str, str]:
    """(matrix of the base model, "A" or "B") of a tensor's name. Raises `InvalidAdapterError` for anything else."""
    name = tensor_name.removeprefix(_PREFIX)
    for end, what in (
        (".lora_embedding_A", "it adapts an embedding, which is not served"),
        (".lora_embedding_B", "it adapts an embedding, which is not served"),
        (".lora_magnitude_vector", "it belongs to DoRA, which is not served"),
        (".bias", "biases are not served"),
    ):
        if name.removesuffix(".weight").endswith(end):
            raise invalid_adapter(shown, f"tensor {tensor_name!r} is not used: {what}")
    for letter in "AB":
        for end in (f".lora_{letter}.weight", f".lora_{letter}.default.weight"):
            if name.endswith(end):
                return name.removesuffix(end), letter
    raise invalid_adapter(
        shown, f"tensor {tensor_name!r} is neither lora_A nor lora_B of a layer; names are like "
        f"'{_PREFIX}model.layers.0.self_attn.q_proj.lora_A.weight'",
    )  # fmt: skip
