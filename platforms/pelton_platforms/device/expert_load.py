"""Load of a model's experts: the tokens that each was given, read from the counters of its layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pelton.errors import NotSupportedError

if TYPE_CHECKING:
    from pelton_platforms.device.loaded import LoadedModel


@torch.inference_mode()
def read_expert_load(loaded: LoadedModel, *, reset: bool) -> dict[str, list[int]]:
    """Return the counts by the layers' module names, each over the experts of all ranks: since the start, or the last reset. A collective
    call. Raises `NotSupportedError` where nothing is counted, and where stages have the layers."""
    model, parallel = loaded.model, loaded.build.parallel
    loads = {name: getattr(module, "expert_load", None) for name, module in model.named_modules()}
    counters = {name: counter for name, counter in loads.items() if counter is not None}
    if not counters:
        raise NotSupportedError(
            "No layer counts what its experts get. Set plugin_config.models.count_expert_load, for a model with experts."
        )
    if parallel.stages is not None:
        raise NotSupportedError(
            "Stages (pipeline_parallel_size) do not tell each other what their experts get. Use one stage."
        )
    total = torch.stack(list(counters.values()))
    if reset:
        for counter in counters.values():
            counter.zero_()
    if loaded.build.has_whole_experts:  # else every rank counts all tokens
        total = parallel.all_reduce(total)
    found = dict(zip(counters, total.tolist(), strict=True))
    for name, load in found.items():  # experts may have changed places
        placement = getattr(model.get_submodule(name), "placement", range(len(load)))
        found[name] = [0] * (max(placement) + 1)
        for expert, count in zip(placement, load, strict=True):
            found[name][expert] += count
    return found
