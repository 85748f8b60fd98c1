"""Side tables on the device: see `pelton.sampling.side_tables`. They start as zeros, which means "nothing": on a CPU untouched rows
take no memory."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from pelton.messages.step import NewRequest
from pelton.sampling.side_tables import BAD_WORDS, BANNED, BIAS, GROUP, MIN_TOKENS, PENALTIES, SideTensors
from pelton_platforms.device.steps.staging import Column, StagingRing

_NO_WORD = -1  # length of a bad word's prefix where there is none
_BAD_WORDS, _BAD_WORD_PREFIX = 32, 16  # room at first: words of more than one token, tokens before a word's last


def side_table_bytes(num_side_slots: int, vocab_size: int) -> int:
    """Bytes of the tables as wide as the vocabulary."""
    return num_side_slots * (vocab_size * (4 + 1 + 4 + 1 + 1) + -(-vocab_size // GROUP))


class SideTables(SideTensors):
    """Written when a request gets its side slot; `counts` also after each step. A number that is assigned to places is copied
    to the device, and the copy waited for: hence `fill_` and `index_fill_`."""

    def __init__(self, num_side_slots: int, vocab_size: int, device: torch.device, num_parts: int = 3) -> None:
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
        # Groups of tokens that may differ from the model's logits: the others' entries above need not be read.
        self.touched = torch.zeros(num_side_slots, -(-vocab_size // GROUP), dtype=torch.int8, device=device)
        self.features = torch.zeros(num_side_slots, dtype=torch.int32, device=device)  # what a slot uses, see BANNED
        self._staging = StagingRing(num_parts, 4096, device)
        self.layout_version = 0  # counts moves of tensors (longer bad words came): graphs captured before are stale
        # What the host knows, to run only what a step needs.
        self.has_penalties = np.zeros(num_side_slots, dtype=bool)
        self.has_bias = np.zeros(num_side_slots, dtype=bool)
        self.has_banned = np.zeros(num_side_slots, dtype=bool)
        self.has_min_tokens = np.zeros(num_side_slots, dtype=bool)
        self.has_bad_words = np.zeros(num_side_slots, dtype=bool)

    def add(self, *requests: NewRequest) -> None:
        """Fill the rows of requests, whoever had them before: one copy, and one write a table, however many they are."""
        slots = np.array([request.side_slot for request in requests], dtype=np.int64)
        params = [request.sampling_params for request in requests]
        stop_ids = [
            [*request.eos_token_ids, *(own.stop_token_ids or ())] if own.min_tokens else []
            for request, own in zip(requests, params, strict=True)
        ]
        singles = [[word[0] for word in request.bad_words_token_ids if len(word) == 1] for request in requests]
        biases = [
            {token_id: value for token_id, value in (own.logit_bias or {}).items() if token_id < self.vocab_size}
            for own in params
        ]
        penalized = np.array([own.has_penalties for own in params], dtype=bool)
        restricted = np.array([own.allowed_token_ids is not None for own in params], dtype=bool)
        # Without penalties whatever is counted has no weight.
        prompts = [
            r.token_ids[: r.num_prompt_tokens] if own.has_penalties and r.prompt_embeds is None else []
            for r, own in zip(requests, params, strict=True)
        ]
        outputs = [
            r.token_ids[r.num_prompt_tokens :] if own.has_penalties else []
            for r, own in zip(requests, params, strict=True)
        ]
        columns: list[Column] = [
            slots[penalized],
            slots[self.has_bias[slots]],
            slots[self.has_banned[slots] & ~restricted],
            slots[restricted],
            slots[self.has_min_tokens[slots]],
            self._places(slots, prompts, checked=False),
            self._places(slots, outputs, checked=False),
            self._places(slots, biases),
            np.array([value for bias in biases for value in bias.values()], dtype=np.float64).view(np.int64),
            self._places(slots, [own.allowed_token_ids or () for own in params]),
            self._places(slots, singles),
            self._places(slots, stop_ids),
        ]
        self.has_penalties[slots] = penalized
        self.has_bias[slots] = [bool(bias) for bias in biases]
        self.has_banned[slots] = restricted | [bool(ids) for ids in singles]
        self.has_min_tokens[slots] = [bool(ids) for ids in stop_ids]
        words = [[word for word in request.bad_words_token_ids if len(word) > 1] for request in requests]
        had_words = self.has_bad_words[slots]
        self.has_bad_words[slots] = [bool(own) for own in words]
        numbers = [
            [own.presence_penalty for own in params],
            [own.frequency_penalty for own in params],
            [own.repetition_penalty for own in params],
        ]
        columns += [slots, [own.min_tokens for own in params], self._features(slots)]
        columns += [np.array(column, dtype=np.float64).view(np.int64) for column in numbers]
        self._write(self._staging.stage(columns))
        for slot, own_words, had in zip(slots.tolist(), words, had_words.tolist(), strict=True):
            if own_words or had:
                self._set_bad_words(slot, own_words)

    def _write(self, columns: Sequence[Tensor]) -> None:
        """The columns of `add` on the device, in its order."""
        penalized, biased, banned, restricted, early, prompt, output, bias, bias_values, *columns = columns
        allowed, single, stop_ids, slots, min_tokens, features, presence, frequency, repetition = columns
        for tables, rows, value in (
            ((self.counts, self.in_prompt), penalized, 0),
            ((self.bias,), biased, 0),
            ((self.banned,), banned, 0),
            ((self.banned,), restricted, 1),
            ((self.stop_ids,), early, 0),
        ):
            if rows.numel():
                for table in tables:
                    table.index_fill_(0, rows, value)
        for table, places, value in (
            (self.in_prompt, prompt, 1), (self.banned, allowed, 0), (self.banned, single, 1), (self.stop_ids, stop_ids, 1),
        ):  # fmt: skip
            if places.numel():
                table.view(-1).index_fill_(0, places, value)
        self.touched.index_fill_(0, slots, 0)
        self.touched.index_fill_(0, restricted, 1)
        for places in (prompt, output, single, stop_ids, bias):
            if places.numel():
                groups = places // self.vocab_size * self.touched.shape[1] + places % self.vocab_size // GROUP
                self.touched.view(-1).index_fill_(0, groups, 1)
        if output.numel():
            self.counts.view(-1).index_add_(0, output, torch.ones_like(output, dtype=torch.int32))
        if bias.numel():
            self.bias.view(-1).index_copy_(0, bias, bias_values.view(torch.float64).float())
        self.min_tokens.index_copy_(0, slots, min_tokens)
        self.features.index_copy_(0, slots, features.to(torch.int32))
        for column, values in (
            (self.presence_penalty, presence), (self.frequency_penalty, frequency), (self.repetition_penalty, repetition),
        ):  # fmt: skip
            column.index_copy_(0, slots, values.view(torch.float64).float())

    def _places(self, slots: np.ndarray, ids: Sequence[Collection[int]], *, checked: bool = True) -> np.ndarray:
        """Flat places of tokens in the rows `slots`; ids that the model does not have are left out, or clamped."""
        counts = [len(own) for own in ids]
        flat: np.ndarray = np.fromiter(chain.from_iterable(ids), np.int64, sum(counts))
        starts = np.repeat(slots * self.vocab_size, counts)
        is_known = np.full(len(flat), True) if not checked else flat < self.vocab_size
        places: np.ndarray = (starts + flat.clip(0, self.vocab_size - 1))[is_known]
        return places

    def _features(self, slots: np.ndarray) -> np.ndarray:
        """The sum, for each slot, of the bits (`BANNED` and others) that say what it uses."""
        features: np.ndarray = (
            self.has_banned[slots] * BANNED
            + self.has_min_tokens[slots] * MIN_TOKENS
            + self.has_bias[slots] * BIAS
            + self.has_penalties[slots] * PENALTIES
            + self.has_bad_words[slots] * BAD_WORDS
        )
        return features

    def _set_bad_words(self, slot: int, words: list[list[int]]) -> None:
        if not words:
            self.bad_word_prefix_len[slot].fill_(_NO_WORD)
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
        self.touched[slot].index_fill_(0, self.bad_word_last[slot] // GROUP, 1)

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

    def _to_device(self, values: np.ndarray) -> Tensor:
        """From pinned memory: a copy from anywhere else waits for all that the device has to do."""
        tensor = torch.from_numpy(values)
        return tensor if self.device.type == "cpu" else tensor.pin_memory().to(self.device, non_blocking=True)
