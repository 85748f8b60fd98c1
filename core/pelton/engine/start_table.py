"""The table that every start prints: what was found, what was chosen and why, and where the seconds went."""

from __future__ import annotations

from pelton.logging import amount
from pelton.messages.report import EngineInfo
from pelton.model.pooling import PoolingSpec
from pelton.model.resolved import ResolvedModel


def start_table(info: EngineInfo, model: ResolvedModel) -> str:
    """Two columns; notes of what was lowered or shrunk at the end."""
    report = info.report
    num_tokens = max(info.num_blocks - 1, 0) * info.block_size  # block 0 is never handed out
    cache_size = amount(info.kv_cache_bytes, "B")
    facts = ", ".join(filter(None, (model.architecture, model.dtype, model.weights_format, model.made_of)))
    rows = [
        ("model", f"{model.name} ({facts})"),
        *([("pooling", _pooling(model.pooling))] if model.pooling is not None else []),
        ("device", report.device or report.platform),
        ("attention", _with_reason(report.attention_backend, report.attention_reason)),
        *report.choices.items(),
        ("weights", amount(report.weights_bytes, "B")),
        (
            "KV cache",
            f"{info.num_blocks} blocks of {info.block_size} tokens, {cache_size}, room for "
            f"{num_tokens / max(info.max_model_len, 1):.1f} requests of full length"
            if info.kv_cache_bytes
            else "none: this model has no layer with a cache",
        ),
        (
            "limits",
            f"max_model_len {info.max_model_len}, max_num_seqs {info.max_num_seqs}, "
            f"max_num_batched_tokens {info.max_num_batched_tokens}",
        ),
        ("start", _phases(info.phase_s or report.phase_s)),
    ]
    rows += [("note", note) for note in [*model.notes, *report.notes]]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in rows)


def _pooling(spec: PoolingSpec) -> str:
    how = spec.pooling_type if spec.labels else f"{spec.pooling_type}, {'length 1' if spec.normalize else 'any length'}"
    classes = f", {spec.num_labels} classes" if spec.labels else ""
    return f"{', '.join(spec.tasks)} ({how}{classes})"


def _with_reason(what: str, why: str) -> str:
    return f"{what} ({why})" if why else what


def _phases(phase_s: dict[str, float]) -> str:
    parts = [f"{name} {seconds:.1f} s" for name, seconds in phase_s.items()]
    return f"{sum(phase_s.values()):.1f} s" + (f" ({', '.join(parts)})" if parts else "")
