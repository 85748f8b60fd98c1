"""The whole-step kernel of a worker, where plugins offer one that serves its model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from pelton.entries import Entry
from pelton.errors import ConfigError
from pelton.ops.selector import reasons_against
from pelton.plugins import calling
from pelton.worker.step_kernel import NO_KERNEL, StepKernel, StepNeeds

if TYPE_CHECKING:
    from pelton_platforms.device.loaded import LoadedModel


def make_step_kernel(loaded: LoadedModel) -> StepKernel | None:
    """Make it once the model's modules are there, before their weights. The start table names it; notes say why others refuse."""
    platform, build, info = loaded.platform, loaded.build, loaded.info
    entries = loaded.plugins.entries("pelton_step_kernels", device_type=platform.device_type)
    named = loaded.config.compilation.step_kernel
    if info.pooling is not None or build.parallel.stages is not None or not (entries or named):
        return None
    needs = StepNeeds(
        architecture=info.architecture,
        hf=build.hf,
        device_type=platform.device_type,
        dtype=build.dtype_name,
        block_size=build.block_size,
        max_num_seqs=loaded.max_num_seqs,
        capability=platform.capability(loaded.rank),
        kv_dtype=build.kv_dtype,
        quantization=build.quantization.name,
        tp_size=build.parallel.size,
        has_adapters=build.adapters is not None,
    )
    found, refused = select_step_kernel(entries, needs, named)
    loaded.notes.extend(f"step kernel {reason}" for reason in refused)
    if found is None:
        return None
    entry, kernel_class = found
    with calling(entry):
        kernel = kernel_class(loaded.model, build)
    build.ops.read_by(kernel)
    loaded.choices["step kernel"] = entry.name
    return kernel


def select_step_kernel(
    entries: Iterable[Entry], needs: StepNeeds, named: str | None
) -> tuple[tuple[Entry, type[StepKernel]] | None, list[str]]:
    """The kernel of this name, or the first by priority that serves `needs`; and why others do not. Raises `ConfigError` where the
    named one is not there, or refuses."""
    if named == NO_KERNEL:
        return None, []
    offered, refused = list(entries), list[str]()
    for entry in [entry for entry in offered if named in (None, entry.name)]:
        with calling(entry):
            kernel: type[StepKernel] = entry.resolve()
            reasons = reasons_against(kernel, needs)
        if not reasons:
            return (entry, kernel), refused
        refused.append(f"{entry.name}: {', '.join(reasons)}")
    if named is not None:
        known = ", ".join(entry.name for entry in offered) or "none"
        raise ConfigError(f"step_kernel is {named!r}: {'; '.join(refused) or f'available: {known}'}.")
    return None, refused
