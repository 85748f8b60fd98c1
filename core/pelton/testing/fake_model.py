"""A fake model: the next token is a function of all tokens before it. No torch.

A prefix is its running hash, which a fake device keeps per token slot: from a wrong block, slot, position or order of steps
it reads a wrong hash.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from pelton.messages.outputs import FinishReason
from pelton.messages.request import EngineRequest
from pelton.model.resolved import ResolvedModel
from pelton.structured.interface import Grammar

EMPTY = 1  # hash of no tokens
_MODULUS = (1 << 61) - 1


def extend_hash(value: int, token: int) -> int:
    """Running hash of a token sequence, one token longer."""
    return (value * 1_000_003 + token + 7) % _MODULUS


def running_hashes(tokens: Iterable[int]) -> list[int]:
    """The hash through each token."""
    hashes, value = [], EMPTY
    for token in tokens:
        value = extend_hash(value, token)
        hashes.append(value)
    return hashes


@dataclass(frozen=True)
class FakeModel:
    """Defines every continuation: `pick` is the greedy token after a prefix."""

    vocab_size: int = 50
    eos_token_id: int = 0
    eos_every: int = 0  # about every how many tokens EOS comes; 0 for never by itself

    def pick(self, prefix_hash: int, *, bitmask: bytes | bytearray | None = None, banned: Collection[int] = ()) -> int:
        """The token after a prefix: the first allowed one from a place that the prefix decides."""
        start = (prefix_hash >> 13) % self.vocab_size
        if self.eos_every and (prefix_hash >> 31) % self.eos_every == 0:
            start = self.eos_token_id
        elif start == self.eos_token_id:
            start = (start + 1) % self.vocab_size
        for step in range(self.vocab_size):
            token = (start + step) % self.vocab_size
            if token not in banned and (bitmask is None or bitmask[token // 8] >> (token % 8) & 1):
                return token
        raise AssertionError("no token is allowed")

    def draft(self, prefix_hash: int, num_drafts: int, num_right: int) -> list[int]:
        """Tokens that may come next: `num_right` that `pick` gives, then wrong ones."""
        drafts: list[int] = []
        for index in range(num_drafts):
            token = (self.pick(prefix_hash) + (index >= num_right)) % self.vocab_size
            drafts.append(token)
            prefix_hash = extend_hash(prefix_hash, token)
        return drafts

    def generate(
        self, request: EngineRequest, *, max_model_len: int, grammar: Grammar | None = None
    ) -> tuple[list[int], FinishReason]:
        """Return what a request gets when it runs alone, by the rules and not by any scheduler's code."""
        params = request.sampling_params
        prompt = request.prompt_token_ids
        stop_ids = set(params.stop_token_ids or ())
        eos_ids = set() if params.ignore_eos else set(request.eos_token_ids)
        output: list[int] = []
        value = running_hashes(prompt)[-1]
        while True:
            bitmask = None
            if grammar is not None:
                bitmask = bytearray(4 * ((self.vocab_size + 31) // 32))
                grammar.fill_bitmask(bitmask)
            banned = (stop_ids | set(request.eos_token_ids)) if len(output) < params.min_tokens else set()
            token = self.pick(value, bitmask=bitmask, banned=banned)
            output.append(token)
            value = extend_hash(value, token)
            if token in eos_ids or token in stop_ids:
                return output, FinishReason.STOP
            if grammar is not None:
                assert grammar.accept([token])
            if len(output) == params.max_tokens or len(prompt) + len(output) == max_model_len:
                return output, FinishReason.LENGTH
            if grammar is not None and grammar.is_terminated() and (not eos_ids or len(output) < params.min_tokens):
                return output, FinishReason.STOP


def fake_resolved_model(
    *, vocab_size: int = 50, max_model_len: int = 256, eos_token_ids: Sequence[int] = (0,)
) -> ResolvedModel:
    """Make what `resolve_model` would give for the fake model."""
    return ResolvedModel(
        name="fake", path="fake", weights_format="dummy", hf_config={}, architecture="Fake", dtype="float32",
        max_model_len=max_model_len, vocab_size=vocab_size, eos_token_ids=list(eos_token_ids), generation_config={},
        tokenizer_path=None,
    )  # fmt: skip
