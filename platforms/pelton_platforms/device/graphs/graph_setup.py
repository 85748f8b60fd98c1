"""Graphs of a worker: the mode that its model gets, and which sizes are captured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pelton.attention.support import GraphSupport
from pelton.config import CUDAGraphMode
from pelton_platforms.device.graphs.dispatcher import MAX_MIXED_TOKENS, GraphDispatcher
from pelton_platforms.device.graphs.modes import captures_decode, captures_piecewise, lower_mode, requested_mode
from pelton_platforms.device.speed import product_operations

if TYPE_CHECKING:
    from pelton.model.build import BuildConfig
    from pelton_platforms.device.loaded import LoadedModel
    from pelton_platforms.device.steps.model_runner import ModelRunner

_HIDING_OPERATIONS = 6e11
"""Of a layer's products that hide the launches of a layer without graphs: 0.86 ms at the 700 TFLOP/s that large ones reach on an
H200. Those launches take a slow host 0.5 to 0.7 ms, one step in ten up to 1 (docs/performance.md)."""
_MAX_PIECE_TOKENS = 16_384


@dataclass(frozen=True, slots=True)
class GraphLimits:
    """Bounds of what every stage of a model can capture: the same steps go through each, padded alike, whatever its layers are."""

    support: GraphSupport = GraphSupport.ALWAYS
    max_piecewise_tokens: int = _MAX_PIECE_TOKENS


def limits_of_stages(build: BuildConfig, model: Any) -> GraphLimits:
    """Ask all stages, which wait for each other here; the limits of none, where one has all layers."""
    stages = build.parallel.stages
    if stages is None:
        return GraphLimits()
    own = build.attention.graph_support(), max_piecewise_tokens(model, len(build.cache_layers))
    of_all = stages.all_gather(torch.tensor([own], dtype=torch.int32, device=build.device), dim=0)
    support, tokens = of_all.min(dim=0).values.tolist()
    return GraphLimits(GraphSupport(support), tokens)


def setup_graphs(loaded: LoadedModel, runner: ModelRunner) -> None:
    """Have the runner capture steps, where settings, backends and platform allow it."""
    mode = choose_mode(loaded)
    if mode is not CUDAGraphMode.NONE:
        use_graphs(loaded, runner, mode)


def choose_mode(loaded: LoadedModel) -> CUDAGraphMode:
    """Return the mode that the settings ask for, lowered to what backends and platform can do. A note says why, but where a
    platform with graphs makes of a level's mode what it always does."""
    compilation, platform, notes = loaded.config.compilation, loaded.platform, loaded.notes
    offered, named = platform.supported_graph_modes, compilation.cudagraph_mode
    if loaded.build.cacheless_layers:  # their attention is called within the forward pass, and ends no piece of it
        if named not in (None, CUDAGraphMode.NONE):
            notes.append(f"cudagraph_mode {named} became NONE: steps of layers without a cache are not captured")
        return CUDAGraphMode.NONE
    is_pooling = not hasattr(loaded.model, "compute_logits")
    requested = requested_mode(compilation, is_pooling=is_pooling)
    if loaded.drafter is not None:
        return _beside_drafter(requested, loaded)
    mode, why = lower_mode(requested, _support(loaded), offered=offered)
    usual, _ = lower_mode(requested, GraphSupport.ALWAYS, offered=offered)
    is_usual = mode is usual and (mode is not CUDAGraphMode.NONE or set(offered) == {CUDAGraphMode.NONE})
    if mode is not requested and (named is not None or not is_usual):
        notes.append(f"cudagraph_mode {requested} became {mode}: {why}")
    if compilation.enforce_eager and named not in (None, CUDAGraphMode.NONE):
        notes.append(f"enforce_eager wins over cudagraph_mode {named}: no graphs are captured")
    sizes, folder = compilation.cudagraph_capture_sizes, compilation.debug_dump_path
    if mode is CUDAGraphMode.NONE and sizes is not None:
        notes.append(f"cudagraph_capture_sizes {', '.join(map(str, sizes))} left out: no graphs are captured")
    if folder is not None and (mode is CUDAGraphMode.NONE or not platform.dumps_graphs):
        why = "no graphs are captured" if mode is CUDAGraphMode.NONE else f"platform {platform.name!r} writes none"
        notes.append(f"debug_dump_path {folder} stays empty: {why}")
    return mode


def _beside_drafter(requested: CUDAGraphMode, loaded: LoadedModel) -> CUDAGraphMode:
    """Return the mode of steps whose hidden states a drafter reads, and whose drafts it makes in front of them: pieces at most."""
    offered, named = loaded.platform.supported_graph_modes, loaded.config.compilation.cudagraph_mode
    drafter = loaded.drafter
    is_cut = captures_piecewise(requested) and drafter is not None and not drafter.hooks_layers
    mode = CUDAGraphMode.PIECEWISE if is_cut and CUDAGraphMode.PIECEWISE in offered else CUDAGraphMode.NONE
    if mode is not requested and named is not None:
        loaded.notes.append(
            f"cudagraph_mode {named} became {mode}: steps beside a drafter are captured in pieces at most"
        )
    return mode


def use_graphs(loaded: LoadedModel, runner: ModelRunner, mode: CUDAGraphMode) -> None:
    """From now on the runner captures and replays steps, where the platform can. Notes say what became of the mode."""
    platform, notes, support = loaded.platform, loaded.notes, _support(loaded)
    recorder = platform.graph_recorder()
    if recorder is None:
        notes.append(f"cudagraph_mode {mode} became NONE: platform {platform.name!r} gives no recorder")
        return
    foreign = loaded.build.ops.unrecordable() if recorder.runs_calls else []
    kernel = loaded.step_kernel
    if recorder.runs_calls and kernel is not None and not kernel.is_recordable:
        foreign.append(f"step kernel {type(kernel).__name__}")
    if foreign:
        notes.append(f"cudagraph_mode {mode} became NONE: {', '.join(foreign)} may not be recordable")
        return
    if recorder.runs_calls and captures_piecewise(mode):  # it would run the model again, without attention
        whole = CUDAGraphMode.FULL_DECODE_ONLY if captures_decode(mode) else CUDAGraphMode.NONE
        notes.append(f"cudagraph_mode {mode} became {whole}: platform {platform.name!r} records no pieces")
        mode = whole
    drafts = runner.ops.drafts
    query_len = drafts.width if drafts is not None and support >= GraphSupport.UNIFORM_BATCH else 1
    dispatcher = GraphDispatcher(
        mode, max_num_seqs=loaded.max_num_seqs, max_num_tokens=loaded.max_num_tokens,
        sizes=_sizes(loaded, query_len), decode_query_len=query_len,
        max_piecewise_tokens=min(
            max_piecewise_tokens(loaded.model, len(loaded.build.cache_layers)), loaded.graph_limits.max_piecewise_tokens
        ),
        captures_prompts=not recorder.runs_calls and support is GraphSupport.ALWAYS,
    )  # fmt: skip
    keys, wanted = dispatcher.valid_keys(), loaded.config.compilation.cudagraph_capture_sizes or ()
    too_large = [size for size in wanted if size > dispatcher.most_tokens]
    if too_large:
        notes.append(
            f"cudagraph_capture_sizes {', '.join(map(str, too_large))} left out: steps that {mode} captures have at most "
            f"{dispatcher.most_tokens} tokens" + ("" if keys else "; nothing is captured")
        )
    if keys:
        runner.use_graphs(dispatcher, recorder)


def _support(loaded: LoadedModel) -> GraphSupport:
    return min(loaded.build.attention.graph_support(), loaded.graph_limits.support)


def _sizes(loaded: LoadedModel, query_len: int) -> Sequence[int] | None:
    sizes, most = loaded.config.compilation.cudagraph_capture_sizes, loaded.max_num_seqs * query_len
    return range(1, most + 1) if sizes is None and not loaded.platform.pads_graphs else sizes


def max_piecewise_tokens(model: Any, num_layers: int) -> int:
    """Tokens up to which a step is worth capturing in pieces: with more, a layer's products take the device longer than all
    launches of a layer take the host. All experts of a layer count."""
    operations = product_operations(model)
    if not operations:
        return MAX_MIXED_TOKENS
    tokens = int(_HIDING_OPERATIONS * num_layers / operations)
    return min(max(tokens // 64 * 64, MAX_MIXED_TOKENS), _MAX_PIECE_TOKENS)
