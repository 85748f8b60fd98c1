"""RMS norms of transformers' modules as `add_norm` ops. What a module computes is found by trying it, not by its name."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from pelton.ops.interface import AddNorm, AddNormNeeds, AddNormTensors, NormSpec
from pelton.ops.reference import rms_norm

if TYPE_CHECKING:
    from pelton.model.build import BuildConfig

_EPS_NAMES = ("variance_epsilon", "eps", "epsilon")
_TOLERANCE = 1e-5


def find_norm(module: nn.Module) -> NormSpec | None:
    """Return the RMS norm that `module` computes over its last axis; None where it computes anything else."""
    weight = module._parameters.get("weight")
    eps = next((value for name in _EPS_NAMES if isinstance(value := getattr(module, name, None), float)), None)
    is_alone = len(module._parameters) == 1 and not module._buffers and not module._modules
    if weight is None or weight.dim() != 1 or eps is None or not is_alone:
        return None
    random = torch.Generator().manual_seed(0)
    tried = copy.copy(module)
    values = torch.randn(weight.shape, generator=random)
    tried._parameters = {"weight": nn.Parameter(values)}
    x = torch.randn(5, weight.shape[0], generator=random)
    x[4] *= 1e3
    x[1] *= eps**0.5  # eps counts as much as the numbers
    x[2] += 3.0  # a mean that is not zero
    try:
        with torch.no_grad():
            found = tried(x[None])[0]
    except Exception:
        return None
    for unit_offset in (False, True):
        spec = NormSpec(size=weight.shape[0], eps=eps, unit_offset=unit_offset)
        if found.shape == x.shape and torch.allclose(found, rms_norm(x, values, spec), atol=_TOLERANCE, rtol=1e-4):
            return spec
    return None


class Norm(nn.Module):
    """The norm of the last axis of any tensor."""

    def __init__(self, spec: NormSpec, *, config: BuildConfig, prefix: str) -> None:
        super().__init__()
        self.spec = spec
        self.weight = nn.Parameter(config.empty(spec.size), requires_grad=False)
        config.weights.expect(f"{prefix}.weight", (spec.size,), self.weight)
        needs = AddNormNeeds(dtype=config.dtype_name, norm=spec)
        self._add_norm: AddNorm = config.ops.bind("add_norm", needs, AddNormTensors(self.weight))

    def forward(self, x: Tensor) -> Tensor:
        rows, _ = self._add_norm(x.reshape(-1, self.spec.size), None)  # without a residual `x` stays as it is
        return rows.view(x.shape)
