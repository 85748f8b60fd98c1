"""A worker's runner: the KV pool that a plan asks for, the state of the batch, and the ops of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pelton.attention.kv_cache import bind_caches
from pelton.sampling.tails import GREEDY
from pelton.spec_decode.select import make_draft_proposer
from pelton.worker.inputs import InputBuffers
from pelton_platforms.device.kv_pool import KVPool, LayerCache
from pelton_platforms.device.steps.batch_state import BatchState
from pelton_platforms.device.steps.logits_processors import make_processors
from pelton_platforms.device.steps.prompt_embeds import make_prompt_embeds
from pelton_platforms.device.steps.stage_runners import stage_runner
from pelton_platforms.device.steps.step_ops import StepOps

if TYPE_CHECKING:
    from pelton.kv_cache.spec import KVCachePlan
    from pelton.ops.selector import OpSelector
    from pelton_platforms.device.loaded import LoadedModel
    from pelton_platforms.device.steps.model_runner import ModelRunner


def make_runner(loaded: LoadedModel, plan: KVCachePlan, ops: OpSelector) -> ModelRunner:
    """Allocate all of it. Raises `MemoryError` where the pool does not fit, torch's own error where the state does not."""
    config, num_parts = loaded.config, loaded.config.max_steps_in_flight + 1
    bound = bind_caches(plan, loaded.build)
    caches = [LayerCache(one.name, one.group_id, one.views, type(one.spec).__name__) for one in bound.layers]
    pool = KVPool(plan.num_blocks, caches)
    specs, max_model_len = [group.spec for group in plan.groups], loaded.info.max_model_len
    state = BatchState(
        max_num_seqs=loaded.max_num_seqs,
        max_model_len=max_model_len,
        vocab_size=loaded.info.vocab_size,
        block_sizes=[max_model_len if spec.has_fixed_page else spec.block_size for spec in specs],
        num_side_slots=config.scheduler.num_side_slots(loaded.max_num_seqs),
        device=loaded.device,
        num_parts=num_parts,
    )
    state.host.processors = make_processors(loaded)
    # A state is one block, however long its request is.
    pairs = zip(specs, bound.kernel_block_sizes, strict=True)
    kernel_sizes = [max_model_len if spec.has_fixed_page else size for spec, size in pairs]
    buffers = InputBuffers(state, max_num_tokens=loaded.max_num_tokens, kernel_block_sizes=kernel_sizes)
    step_ops = StepOps(ops, state, buffers)
    parallel = loaded.build.parallel
    step_ops.context = parallel.context
    if parallel.size > 1:
        from pelton_platforms.device.steps.logit_shares import BestOfShares, LogitShares

        if isinstance(parallel, LogitShares):
            step_ops.shares = BestOfShares(parallel, state, step_ops.sample(GREEDY))
            if parallel.communicator is not None:
                from pelton_platforms.device.steps.row_shares import RowShares

                step_ops.row_shares = RowShares(parallel, state)
    _use_drafts(loaded, step_ops)
    if loaded.adapters is not None:
        loaded.adapters.by_row, step_ops.adapters = state.adapter_slots, loaded.adapters
    runner = stage_runner(parallel.stages, num_parts)(
        loaded.model, state, buffers, bound.backends, pool, step_ops, num_staging_parts=4 * num_parts,
        stream_wait=loaded.platform.stream_wait() if config.parallel.num_ranks == 1 else None,
    )  # fmt: skip
    runner.step_kernel = loaded.step_kernel
    if loaded.drafter is not None:
        runner.use_drafter(loaded.drafter)
    runner.prompt_embeds = make_prompt_embeds(loaded)
    if config.kv_cache.calculate_kv_scales:
        from pelton_platforms.device.cache_scales import make_calculated_scales

        runner.cache_scales = make_calculated_scales(loaded)
    return runner


def _use_drafts(loaded: LoadedModel, step_ops: StepOps) -> None:
    """Let rows have drafts where the settings say so; on a GPU the device makes them itself, where the proposer has a way. A drafter
    makes them on every device."""
    if loaded.drafter is not None:
        step_ops.use_drafts(loaded.drafter.num_drafts, has_drafter=True)
        return
    proposer = make_draft_proposer(loaded.config, loaded.info, loaded.plugins)
    if proposer is None:
        return
    on_device = loaded.config.speculative.drafts_on_device
    is_made_there = on_device or (on_device is None and loaded.device.type != "cpu")
    step_ops.use_drafts(proposer.max_draft_tokens, proposer.lookup if is_made_there else None)
