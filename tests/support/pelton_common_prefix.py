"""Requests that share a prefix, through the whole engine: their ids, and that attention read the prefix once for all."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from pelton_e2e import GapReference, gap_reference, generate, greedy, make_llm, make_prompts

from pelton_backends.triton import backend
from pelton_platforms.device.graphs.captures import FullGraphs

NUM_TOKENS = 5


@dataclass
class PrefixReads:
    """How steps read it."""

    host_lengths: set[int] = field(default_factory=set)  # of calls that were told the length
    num_device_calls: int = 0  # that find it on the device
    num_replays: int = 0  # of graphs with such calls


@pytest.fixture
def prefix_reads(monkeypatch: pytest.MonkeyPatch) -> PrefixReads:
    reads = PrefixReads()
    cascade, run = backend.cascade_attention, FullGraphs.run

    def counted_cascade(*args: Any, prefix_len: Any, **named: Any) -> Any:
        if isinstance(prefix_len, torch.Tensor):
            reads.num_device_calls += 1
        else:
            reads.host_lengths.add(prefix_len)
        return cascade(*args, prefix_len=prefix_len, **named)

    def counted_run(self: FullGraphs, mode: Any, key: Any, call: Any) -> Any:
        reads.num_replays += getattr(key, "has_common_prefix", False) and key in self
        return run(self, mode, key, call)

    monkeypatch.setattr(backend, "cascade_attention", counted_cascade)
    monkeypatch.setattr(FullGraphs, "run", counted_run)
    return reads


def prefix_reference(path: str, vocab_size: int, *, num_rows: int, prefix_len: int, device: str) -> GapReference:
    """Prompts of one prefix and two tokens of their own."""
    (prefix,) = make_prompts(vocab_size, (prefix_len,))
    prompts = [[*prefix, 10 + row, 11] for row in range(num_rows)]
    return gap_reference("llama", path, prompts, NUM_TOKENS, device)


def check_common_prefix(reference: GapReference, reads: PrefixReads, *, is_captured: bool, **settings: Any) -> None:
    num_rows, prefix_len = len(reference.prompts), len(reference.prompts[0]) - 2
    with make_llm(reference.path, max_num_seqs=num_rows, max_model_len=prefix_len + 32, **settings) as llm:
        reads.host_lengths.clear()  # a first start has gone through steps of its own
        generate(llm, reference.prompts[:1], greedy(1))
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in reference.prompts], greedy(NUM_TOKENS), use_tqdm=False
        )
    assert {output.num_cached_tokens for output in outputs} == {prefix_len}
    reference.check([list(output.outputs[0].token_ids) for output in outputs])
    if is_captured:
        assert reads.num_device_calls and reads.num_replays and not reads.host_lengths
    else:
        assert reads.host_lengths == {prefix_len} and not reads.num_device_calls
