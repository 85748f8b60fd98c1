"""Memory of a worker beside weights and KV cache: what its state holds and what its largest step computes in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from pelton.attention.metadata import ForwardBatch
from pelton.errors import ConfigError
from pelton.kv_cache.planner import plan_groups
from pelton_platforms.device.steps.side_tables import side_table_bytes

if TYPE_CHECKING:
    from pelton.kv_cache.spec import KVCachePlan
    from pelton_platforms.device.graphs.graph_runner import GraphRunner
    from pelton_platforms.device.loaded import LoadedModel

ATTENTION_BYTES = 64 << 20
"""Of partial results of long contexts, which a backend keeps for a KV group: 8 kv heads of 128 numbers take about half."""


class StepMemory:
    """Asked before the KV cache is sized, and after it was allocated."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self._room = 0  # bytes for a KV cache, as the platform found them
        self._peak_bytes = 0  # of the largest step, where the platform can measure it

    def find_room(self, weights_bytes: int) -> int:
        """Bytes for a KV cache, after the largest step has run, where the platform can say what it took; else after an estimate of
        it."""
        loaded = self._loaded
        peak = loaded.platform.measure_peak_bytes(self.run_largest_step)
        self._peak_bytes = peak or 0
        if peak is None:
            peak = self.step_bytes(loaded.max_num_tokens, loaded.max_num_seqs, bytes_a_logit=16)
        self._room = loaded.platform.available_kv_cache_bytes(
            loaded.config, weights_bytes=weights_bytes, peak_activation_bytes=peak + self.state_bytes()
        )
        return self._room

    def run_largest_step(self) -> None:
        """Run its forward pass, and a tail that samples every row in float32. There is no pool yet: attention gives zeros, and
        `state_bytes` has what it computes in."""
        loaded = self._loaded
        tokens = torch.arange(loaded.max_num_tokens, device=loaded.device)
        batch = ForwardBatch(
            input_ids=torch.zeros_like(tokens),
            positions=tokens.clamp(max=loaded.info.max_model_len - 1),
            attention=(),
            num_tokens=loaded.max_num_tokens,
        )
        hidden = loaded.model.forward(batch)
        if loaded.drafter is not None:
            from pelton.spec_decode.drafter import DraftPass

            step = DraftPass(batch=batch, following=batch.input_ids, hidden=hidden, last=tokens[: loaded.max_num_seqs])
            loaded.drafter.follow(step)
        if hasattr(loaded.model, "compute_logits"):
            logits = loaded.model.compute_logits(hidden, tokens[: loaded.max_num_seqs])
            logits.softmax(dim=-1, dtype=torch.float32)

    def state_bytes(self) -> int:
        """About what is allocated after the profile, whether steps are captured or not: token ids and block tables of every
        row, side tables, and attention's scratch."""
        loaded = self._loaded
        rows, max_model_len = loaded.max_num_seqs, loaded.info.max_model_len
        side = side_table_bytes(loaded.config.scheduler.num_side_slots(rows), loaded.info.vocab_size)
        num_groups = len(plan_groups(loaded.specs)[0]) if loaded.specs else 0
        blocks = 2 * num_groups * -(-max_model_len // loaded.config.kv_cache.block_size)  # of the state, and of a step
        return rows * (max_model_len + blocks) * 4 + side + num_groups * ATTENTION_BYTES

    def step_bytes(self, num_tokens: int, num_rows: int, *, bytes_a_logit: int = 4) -> int:
        """About what a step computes in: hidden states of its tokens, logits of its rows (with 16 bytes each also
        probabilities and their float64 sums)."""
        hf, item_bytes = self._loaded.build.hf, self._loaded.build.dtype.itemsize
        inner = hf.get("intermediate_size", 0)
        inner = max(inner) if isinstance(inner, list) else inner  # of each layer
        widest = max(inner * 2, hf.get("hidden_size", 0) * 4)
        hidden_bytes: int = num_tokens * widest * item_bytes * 2
        return hidden_bytes + num_rows * self._loaded.info.vocab_size * bytes_a_logit

    def make_room_for_captures(self, graphs: GraphRunner) -> None:
        """Allocate what all captured steps compute in."""
        dispatcher = graphs.dispatcher
        most_tokens = max((sizes[-1] for sizes in dispatcher.decode_sizes.values() if sizes), default=0)
        num_bytes = self.step_bytes(max([most_tokens, *dispatcher.mixed_sizes]), most_tokens)
        try:
            graphs.make_room(num_bytes)
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"Captured graphs compute in {num_bytes} bytes, which are not left beside the KV cache. Set num_gpu_blocks_override, "
                "kv_cache_memory_bytes, max_num_batched_tokens or max_num_seqs lower, or enforce_eager."
            ) from error

    def take_for_steps(self) -> None:
        """Have torch take what the largest step needs, in one piece. Otherwise the first large steps under load take it
        from the driver, each in pieces of its own sizes."""
        try:
            torch.empty(self._peak_bytes, dtype=torch.uint8, device=self._loaded.device)
        except RuntimeError as error:
            self._loaded.notes.append(
                f"less memory is left than the largest step takes ({self._peak_bytes} bytes), so large steps may fail: set "
                f"num_gpu_blocks_override, kv_cache_memory_bytes or max_num_batched_tokens lower ({str(error).splitlines()[0]})"
            )

    def why_no_cache(self, plan: KVCachePlan, error: MemoryError) -> ConfigError:
        """Say which setting asks for a cache of `plan` that cannot be allocated."""
        kv_cache, num_bytes = self._loaded.config.kv_cache, sum(tensor.size_bytes for tensor in plan.tensors)
        names = ("num_gpu_blocks_override", "kv_cache_memory_bytes", "gpu_memory_utilization")
        name = next(name for name in names if getattr(kv_cache, name) is not None)
        room = self._room
        fits = (
            f": {room * plan.num_blocks // num_bytes} blocks, {room} bytes, were found to fit"
            if room < num_bytes
            else ""
        )
        return ConfigError(
            f"{name} is {getattr(kv_cache, name)}: a KV cache of {plan.num_blocks} blocks takes {num_bytes} bytes, which "
            f"cannot be allocated ({error}). Set it lower{fits}."
        )

    def why_no_state(self) -> ConfigError:
        """Say which settings ask for more state than there is memory beside the cache."""
        return ConfigError(
            f"The state of {self._loaded.max_num_seqs} requests takes about {self.state_bytes()} bytes, which are not left "
            "beside the KV cache. Set num_gpu_blocks_override, kv_cache_memory_bytes, max_num_seqs or max_side_table_seqs lower."
        )


def module_bytes(module: Any) -> int:
    """Bytes of a module's parameters and buffers; shared memory counts once."""
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in [*module.parameters(), *module.buffers()]
    }
    total: int = sum(storages.values())
    return total
