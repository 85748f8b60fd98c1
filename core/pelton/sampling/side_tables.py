"""Side tables: what few requests need to sample, by side slot, each as wide as the vocabulary; as ops read them.

Z = side slots, V = vocabulary, W = bad words of the widest request, L = tokens before the last of the longest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pelton import moved

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor
else:
    __getattr__ = moved.names_of(__name__)

GROUP = 32
"""Tokens of a group of `SideTensors.touched`."""
BANNED, MIN_TOKENS, BIAS, PENALTIES, BAD_WORDS = 1, 2, 4, 8, 16
"""Bits of `SideTensors.features`."""


class SideTensors:
    """The tables that a worker fills when a request gets its side slot; `counts` also after each step."""

    vocab_size: int
    counts: Tensor  # [Z, V] int32, of output tokens
    in_prompt: Tensor  # [Z, V] bool
    bias: Tensor  # [Z, V] float32
    banned: Tensor  # [Z, V] bool; a bad word of one token is here
    stop_ids: Tensor  # [Z, V] bool, not to be sampled before min_tokens
    presence_penalty: Tensor  # [Z] float32, as the next two
    frequency_penalty: Tensor
    repetition_penalty: Tensor
    min_tokens: Tensor  # [Z] int64
    bad_word_prefix: Tensor  # [Z, W, L] int32, aligned right
    bad_word_prefix_len: Tensor  # [Z, W] int64, -1 where there is no word
    bad_word_last: Tensor  # [Z, W] int64
    touched: Tensor  # [Z, V / GROUP] int8: groups of tokens that may differ from the model's logits; the others need not be read
    features: Tensor  # [Z] int32: what a slot uses, see BANNED
    layout_version: int  # counts moves of tensors (longer bad words came): graphs captured before are stale
    # [Z] each, on the host, to run only what a step needs.
    has_penalties: npt.NDArray[Any]
    has_bias: npt.NDArray[Any]
    has_banned: npt.NDArray[Any]
    has_min_tokens: npt.NDArray[Any]
    has_bad_words: npt.NDArray[Any]

    def count(self, side_slots: Tensor, token_ids: Tensor, weights: Tensor) -> None:
        """Add sampled tokens [m] to the counts of `side_slots` [m]; weights [m] int32, 0 for a token not taken."""
        self.counts.view(-1).index_add_(0, side_slots * self.vocab_size + token_ids, weights)
        self.touched.view(-1).index_fill_(0, side_slots * self.touched.shape[1] + token_ids // GROUP, 1)
