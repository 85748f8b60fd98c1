"""Rows for tests of ops that sample: states of requests with every parameter, and copies of them for the reference."""

from __future__ import annotations

import random
from typing import Any

import torch

from pelton.messages.step import NewRequest
from pelton.ops.interface import SampleNeeds, SampleTensors
from pelton.sampling_params import SamplingParams
from pelton_platforms.device.steps.batch_state import BatchState

MAX_LEN = 40
CPU = torch.device("cpu")


def make_state(vocab: int, num_seqs: int = 8, num_side_slots: int = 0, device: torch.device = CPU) -> BatchState:
    return BatchState(
        max_num_seqs=num_seqs, max_model_len=MAX_LEN, vocab_size=vocab, block_sizes=(4,), num_side_slots=num_side_slots,
        device=device,
    )  # fmt: skip


def copy_of(state: BatchState, device: torch.device = CPU) -> BatchState:
    """For the reference, on a CPU: torch.max takes any of equal logits elsewhere."""
    other = make_state(state.vocab_size, state.max_num_seqs, state.side.counts.shape[0], device)
    for source, target in ((state, other), (state.side, other.side)):
        for name, value in vars(source).items():
            if isinstance(value, torch.Tensor):
                getattr(target, name).copy_(value)
    return other


def add(
    state: BatchState, slot: int, tokens: list[int], *, side_slot: int = -1, seed: int = 0, bad_words=(),
    num_output: int = 5, **params,
):  # fmt: skip
    """A request whose last token is to be computed in the step."""
    new = NewRequest(
        request_id=str(slot), slot=slot, token_ids=tokens, num_prompt_tokens=max(len(tokens) - num_output, 1),
        num_computed_tokens=len(tokens) - 1, sampling_params=SamplingParams(**params), block_ids=[[1 + slot]],
        side_slot=side_slot, seed=seed, bad_words_token_ids=list(bad_words), eos_token_ids=[2],
    )  # fmt: skip
    state.add([new])


def bind(
    state: BatchState, op: Any, *, variant: str = "full", num_logprobs: int = 0, has_nuclei: bool = True, **tensors: Any
) -> Any:  # fmt: skip
    needs = SampleNeeds(
        vocab_size=state.vocab_size, max_num_seqs=state.max_num_seqs, variant=variant, has_mask="mask" in tensors,
        num_logprobs=num_logprobs, has_nuclei=has_nuclei,
    )  # fmt: skip
    assert op.unsupported(needs) == []
    return op.bind(needs, SampleTensors(state=state, **tensors))


def random_side(chooser: random.Random, vocab: int) -> dict:
    """Each feature with even odds."""
    params: dict = {"bad_words": []}
    if chooser.random() < 0.5:
        params |= {"repetition_penalty": chooser.choice([0.7, 1.5]), "presence_penalty": chooser.uniform(-1, 1),
                   "frequency_penalty": chooser.uniform(-1, 1)}  # fmt: skip
    if chooser.random() < 0.5:
        params["logit_bias"] = {chooser.randrange(vocab): chooser.uniform(-9, 9) for _ in range(4)}
    if chooser.random() < 0.4:
        params["allowed_token_ids"] = [chooser.randrange(vocab) for _ in range(60)] + [5]
    if chooser.random() < 0.5:
        params |= {"min_tokens": chooser.randint(1, 8), "stop_token_ids": [chooser.randrange(vocab)]}
    if chooser.random() < 0.7:
        params["bad_words"] = [[chooser.randrange(4) for _ in range(chooser.randint(1, 4))] for _ in range(10)]
    return params


def assert_same_state(state: BatchState, other: BatchState) -> None:
    assert torch.equal(state.num_computed_tokens.cpu(), other.num_computed_tokens.cpu())
    assert torch.equal(state.token_ids.cpu(), other.token_ids.cpu())
    assert torch.equal(state.side.counts.cpu(), other.side.counts.cpu())
