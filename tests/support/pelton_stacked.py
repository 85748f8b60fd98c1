"""Experts of a checkpoint as one tensor a matrix."""

from __future__ import annotations

import re

import torch


def stacked(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same with `...experts.gate_up_proj` [E, 2 I, H] and `...experts.down_proj` [E, H, I] for each expert's three matrices."""
    pattern = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
    rest, found = dict(tensors), dict[str, dict[str, dict[int, torch.Tensor]]]()
    for name in tensors:
        if match := pattern.fullmatch(name):
            prefix, expert, matrix = match.groups()
            found.setdefault(prefix, {}).setdefault(matrix, {})[int(expert)] = rest.pop(name)
    assert found
    for prefix, matrices in found.items():
        gate, up, down = (torch.stack([matrices[m][i] for i in sorted(matrices[m])]) for m in ("gate", "up", "down"))
        rest |= {f"{prefix}.gate_up_proj": torch.cat([gate, up], dim=1), f"{prefix}.down_proj": down}
    return rest


def apart(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The reverse: three matrices of each expert."""
    found = dict(tensors)
    for name in [name for name in tensors if name.endswith((".experts.gate_up_proj", ".experts.down_proj"))]:
        prefix, _, matrix = name.rpartition(".")
        for expert, weight in enumerate(found.pop(name)):
            parts = {"down_proj": weight}
            if matrix == "gate_up_proj":
                parts = dict(zip(("gate_proj", "up_proj"), weight.chunk(2), strict=True))
            found |= {f"{prefix}.{expert}.{part}.weight": one.clone() for part, one in parts.items()}
    return found
