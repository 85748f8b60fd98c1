"""Report of a worker's start: what the start table says of its device and its model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pelton.messages.report import DeviceReport
from pelton_platforms.device.work import work_of

if TYPE_CHECKING:
    from pelton_platforms.device.loaded import LoadedModel
    from pelton_platforms.device.steps.model_runner import ModelRunner


def make_report(
    loaded: LoadedModel, runner: ModelRunner | None, *, weights_bytes: int, phase_s: dict[str, float]
) -> DeviceReport:
    """runner: None before there is a KV cache."""
    selections = loaded.build.attention.selections()
    drafts = None if runner is None else runner.ops.drafts
    processors = None if runner is None else runner.state.host.processors
    return DeviceReport(
        device=loaded.platform.describe(loaded.rank),
        platform=loaded.platform.name,
        attention_backend=", ".join(dict.fromkeys(selection.name for selection in selections)),
        attention_reason="; ".join(dict.fromkeys(selection.reason for selection in selections)),
        choices=loaded.choices,
        weights_bytes=weights_bytes,
        work=work_of(loaded),
        phase_s=phase_s,
        notes=loaded.notes,
        logits_processors=[] if processors is None else processors.names,
        num_draft_tokens=drafts.width - 1 if drafts is not None and drafts.are_made_here else 0,
        adapter_modules=[] if loaded.adapters is None else loaded.adapters.layers.target_modules,
    )
