"""Side tables: what few requests need to sample, by side slot, each as wide as the vocabulary.

Z = side slots, V = vocabulary, W = bad words of the widest request, L = tokens before the last of the longest.
Tables start as zeros, which means "nothing": on a CPU untouched rows take no memory.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pelton.scheduler.output import NewRequest

_NO_WORD = -1  # length of a bad word's prefix where there is none
_BAD_WORDS, _BAD_WORD_PREFIX = 32, 16  # room at first: words of more than one token, tokens before a word's last


def side_table_bytes(num_side_slots: int, vocab_size: int) -> int:
    """Of the tables as wide as the vocabulary."""
    return num_side_slots * vocab_size * (4 + 1 + 4 + 1 + 1)


class SideTables:
    """Written when a request gets its side slot; `counts` also after each step. A number that is assigned to places is copied
    to the device, and the copy waited for: hence `fill_` and `index_fill_`."""

    def __init__(self, num_side_slots: int, vocab_size: int, device: torch.device) -> None:
        shape = (num_side_slots, vocab_size)
        self.vocab_size = vocab_size
        self.device = device
        self.counts = torch.zeros(shape, dtype=torch.int32, device=device)  # of output tokens
        self.in_prompt = torch.zeros(shape, dtype=torch.bool, device=device)
        self.bias = torch.zeros(shape, dtype=torch.float32, device=device)
        self.banned = torch.zeros(shape, dtype=torch.bool, device=device)
        self.stop_ids = torch.zeros(shape, dtype=torch.bool, device=device)  # not to be sampled before min_tokens
        self.presence_penalty = torch.zeros(num_side_slots, device=device)
        self.frequency_penalty = torch.zeros(num_side_slots, device=device)
        self.repetition_penalty = torch.ones(num_side_slots, device=device)
        self.min_tokens = torch.zeros(num_side_slots, dtype=torch.int64, device=device)
        # A bad word of one token is in `banned`. Prefixes are aligned right.
        words = (num_side_slots, _BAD_WORDS)
        self.bad_word_prefix = torch.zeros(*words, _BAD_WORD_PREFIX, dtype=torch.int32, device=device)
        self.bad_word_prefix_len = torch.full(words, _NO_WORD, dtype=torch.int64, device=device)
        self.bad_word_last = torch.zeros(words, dtype=torch.int64, device=device)
        self.layout_version = 0  # counts moves of tensors (longer bad words came): graphs captured before are stale
        # What the host knows, to run only what a step needs.
        self.has_penalties = np.zeros(num_side_slots, dtype=bool)
        self.has_bias = np.zeros(num_side_slots, dtype=bool)
        self.has_banned = np.zeros(num_side_slots, dtype=bool)
        self.has_min_tokens = np.zeros(num_side_slots, dtype=bool)
        self.has_bad_words = np.zeros(num_side_slots, dtype=bool)

    def add(self, request: NewRequest) -> None:
        """Fill the request's rows, whoever had them before."""
        slot, params = request.side_slot, request.sampling_params
        self.has_penalties[slot] = params.has_penalties
        if params.has_penalties:  # without penalties whatever is counted here has no weight
            self.counts[slot].zero_()
            self.in_prompt[slot].zero_()
            self._count(slot, request.token_ids, request.num_prompt_tokens)
        self.presence_penalty[slot].fill_(params.presence_penalty)
        self.frequency_penalty[slot].fill_(params.frequency_penalty)
        self.repetition_penalty[slot].fill_(params.repetition_penalty)
        self._set_bias(slot, params.logit_bias or {})
        single = [word[0] for word in request.bad_words_token_ids if len(word) == 1]
        self._set_banned(slot, params.allowed_token_ids, single)
        stop_ids = [*request.eos_token_ids, *(params.stop_token_ids or ())] if params.min_tokens else []
        if self.has_min_tokens[slot]:
            self.stop_ids[slot].zero_()
        self.has_min_tokens[slot] = bool(stop_ids)
        if stop_ids:
            self.stop_ids[slot].index_fill_(0, self._ids(stop_ids), True)
        self.min_tokens[slot].fill_(params.min_tokens)
        self._set_bad_words(slot, [word for word in request.bad_words_token_ids if len(word) > 1])

    def count(self, side_slots: Tensor, token_ids: Tensor, weights: Tensor) -> None:
        """Add sampled tokens [m] to the counts of `side_slots` [m]; weights [m] int32, 0 for a token not taken."""
        self.counts.view(-1).index_add_(0, side_slots * self.vocab_size + token_ids, weights)

    def _count(self, slot: int, token_ids: list[int], num_prompt_tokens: int) -> None:
        ids = self._ids(token_ids, checked=False)
        self.in_prompt[slot].index_fill_(0, ids[:num_prompt_tokens], True)
        output = ids[num_prompt_tokens:]
        if output.numel():
            ones = torch.ones_like(output, dtype=torch.int32)
            self.counts[slot].index_add_(0, output, ones)

    def _set_bias(self, slot: int, bias: dict[int, float]) -> None:
        if self.has_bias[slot]:
            self.bias[slot].zero_()
        kept = {token_id: value for token_id, value in bias.items() if token_id < self.vocab_size}
        self.has_bias[slot] = bool(kept)
        if kept:
            values = self._to_device(np.asarray(list(kept.values()), dtype=np.float32))
            self.bias[slot, self._ids(list(kept))] = values

    def _set_banned(self, slot: int, allowed: list[int] | None, banned: list[int]) -> None:
        if self.has_banned[slot]:
            self.banned[slot].zero_()
        self.has_banned[slot] = allowed is not None or bool(banned)
        if allowed is not None:
            self.banned[slot].fill_(True)
            self.banned[slot].index_fill_(0, self._ids(allowed), False)
        if banned:
            self.banned[slot].index_fill_(0, self._ids(banned), True)

    def _set_bad_words(self, slot: int, words: list[list[int]]) -> None:
        if self.has_bad_words[slot]:
            self.bad_word_prefix_len[slot].fill_(_NO_WORD)
        self.has_bad_words[slot] = bool(words)
        if not words:
            return
        self._grow_bad_words(len(words), max(map(len, words)) - 1)
        _, num_words, length = self.bad_word_prefix.shape
        prefix = np.zeros((num_words, length), dtype=np.int32)
        prefix_len, last = np.full(num_words, _NO_WORD), np.zeros(num_words, dtype=np.int64)
        for index, word in enumerate(words):
            if max(word) >= self.vocab_size:
                continue  # can never be sampled
            prefix[index, length - len(word) + 1 :] = word[:-1]
            prefix_len[index], last[index] = len(word) - 1, word[-1]
        self.bad_word_prefix[slot] = self._to_device(prefix)
        self.bad_word_prefix_len[slot] = self._to_device(prefix_len)
        self.bad_word_last[slot] = self._to_device(last)

    def _grow_bad_words(self, num_words: int, length: int) -> None:
        num_slots, old_words, old_length = self.bad_word_prefix.shape
        if num_words <= old_words and length <= old_length:
            return
        num_words, length = (
            max(old, 1 << (new - 1).bit_length()) for old, new in ((old_words, num_words), (old_length, length))
        )
        prefix = self.bad_word_prefix.new_zeros(num_slots, num_words, length)
        prefix[:, :old_words, length - old_length :] = self.bad_word_prefix
        prefix_len = self.bad_word_prefix_len.new_full((num_slots, num_words), _NO_WORD)
        prefix_len[:, :old_words] = self.bad_word_prefix_len
        last = self.bad_word_last.new_zeros(num_slots, num_words)
        last[:, :old_words] = self.bad_word_last
        self.bad_word_prefix, self.bad_word_prefix_len, self.bad_word_last = prefix, prefix_len, last
        self.layout_version += 1

    def _ids(self, token_ids: list[int], *, checked: bool = True) -> Tensor:
        """As an index; ids that the model does not have are left out, or clamped where places matter."""
        ids = np.asarray(token_ids, dtype=np.int64)
        ids = ids[ids < self.vocab_size] if checked else ids.clip(0, self.vocab_size - 1)
        return self._to_device(ids)

    def _to_device(self, values: np.ndarray) -> Tensor:
        """From pinned memory: a copy from anywhere else waits for all that the device has to do."""
        tensor = torch.from_numpy(values)
        return tensor if self.device.type == "cpu" else tensor.pin_memory().to(self.device, non_blocking=True)
