"""`GraphDispatcher`: the only owner of the keys that steps are captured and replayed under.

It answers FULL where a whole step of that shape may be one graph, else PIECEWISE, else NONE; wrappers trust it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from pelton.attention.metadata import BatchDescriptor
from pelton.config.compilation import CUDAGraphMode
from pelton_platforms.device.graphs.modes import captures_decode, captures_piecewise

if TYPE_CHECKING:
    from pelton.sampling.tails import Tail

MAX_MIXED_TOKENS = 512
"""Of the largest captured step that is not a decode step, unless `max_piecewise_tokens` says more."""
_LEAST_PROMPT_SIZE = 16
"""Of a prompt as one graph. The pieces of smaller ones are captured at the start, before the first request."""
_SMALL_SIZES = (1, 2, 4, 8, *range(16, 65, 8), *range(80, 257, 16), *range(288, 513, 32))


class GraphDispatcher:
    """Sizes are tokens; a step is padded to the next one."""

    def __init__(
        self,
        mode: CUDAGraphMode,
        *,
        max_num_seqs: int,
        max_num_tokens: int,
        sizes: Sequence[int] | None = None,
        decode_query_len: int = 1,
        max_piecewise_tokens: int = MAX_MIXED_TOKENS,
        captures_prompts: bool = False,
    ) -> None:
        """sizes: of all graphs, from the settings; chosen from the limits when None. decode_query_len: 1 + drafts; decode steps
        without drafts are captured as well.
        max_piecewise_tokens: of a step in pieces, beyond which the launches of its kernels hide behind their work. captures_prompts:
        a step of one prompt alone may be one graph, where decode steps are: all backends have to be `GraphSupport.ALWAYS`.

        Sizes of decode graphs are whole rows: `sizes` are rounded up to those.
        """
        self.mode = mode
        self.max_num_seqs = max_num_seqs
        self.decode_query_len = decode_query_len
        self.decode_sizes: dict[int, list[int]] = {}  # by tokens of a row
        for length in sorted({1, decode_query_len}) if captures_decode(mode) else ():
            rows = default_sizes(max_num_seqs) if sizes is None else [-(-size // length) for size in sizes]
            counts = _up_to(min(max_num_seqs, max_num_tokens // length), rows)
            self.decode_sizes[length] = [count * length for count in counts]
        most_mixed = max_piecewise_tokens if captures_piecewise(mode) else MAX_MIXED_TOKENS
        mixed = mixed_sizes(min(max_num_tokens, most_mixed)) if sizes is None else sizes
        takes_any = captures_piecewise(mode) or mode is CUDAGraphMode.FULL
        self.mixed_sizes = _up_to(max_num_tokens, mixed) if takes_any else []
        self.prompt_sizes: list[int] = []
        if captures_prompts and self.most_decode_rows:
            self.prompt_sizes = [size for size in self.mixed_sizes if _LEAST_PROMPT_SIZE <= size <= MAX_MIXED_TOKENS]
        most = min(max_num_seqs, max_num_tokens // decode_query_len)
        self.most_tokens = max_num_tokens if takes_any else most * decode_query_len
        """Of a step that may be captured: larger sizes serve none, and are left out."""

    @property
    def most_decode_rows(self) -> int:
        """Rows of the largest decode step; 0 when there is none."""
        return max((sizes[-1] // length for length, sizes in self.decode_sizes.items() if sizes), default=0)

    def dispatch(
        self,
        num_tokens: int,
        num_reqs: int,
        uniform_query_len: int = 0,
        *,
        is_prompt: bool = False,
        has_lora: bool = False,
        tail: Tail | None = None,
    ) -> tuple[CUDAGraphMode, BatchDescriptor]:
        """The mode that a step runs under, and its key, padded. uniform_query_len: most tokens of a row, where rows are decodes and
        their drafts; 0: other rows, whose graphs end at the hidden states.
        is_prompt: the step is one row of several tokens, with none before them."""
        if uniform_query_len in self.decode_sizes:
            size = _padded(self.decode_sizes[uniform_query_len], num_reqs * uniform_query_len)
            if size is not None:
                return CUDAGraphMode.FULL, BatchDescriptor(
                    size, size // uniform_query_len, uniform_query_len, has_lora, tail
                )
        size = _padded(self.mixed_sizes, num_tokens)
        if is_prompt and size in self.prompt_sizes:
            return CUDAGraphMode.FULL, BatchDescriptor(size, 1, has_lora=has_lora, is_prompt=True)
        if size is None:
            return CUDAGraphMode.NONE, BatchDescriptor(num_tokens, num_reqs, uniform_query_len, has_lora, tail)
        if self.mode is CUDAGraphMode.FULL:
            return CUDAGraphMode.FULL, BatchDescriptor(size, min(size, self.max_num_seqs), 0, has_lora)
        return CUDAGraphMode.PIECEWISE, BatchDescriptor(size, 0, 0, has_lora)

    @property
    def most_piece_tokens(self) -> int:
        """Most tokens of a step in pieces; 0 when there are none."""
        return max(self.mixed_sizes, default=0) if self.mode is not CUDAGraphMode.FULL else 0

    def stand_ins(self, key: BatchDescriptor) -> list[BatchDescriptor]:
        """Keys of larger steps that may take the place of this key's, smallest first, up to the next power of two; large pieces,
        whose padding costs more than launches would, up to a quarter more. A prompt alone has pieces instead."""
        if key.is_prompt:
            return []
        uniform = key.uniform_query_len
        sizes = self.decode_sizes[uniform] if uniform else self.mixed_sizes
        first = bisect_right(sizes, key.num_tokens)
        last = bisect_left(sizes, 1 << (key.num_tokens - 1).bit_length())
        if not uniform and key.num_tokens > MAX_MIXED_TOKENS:
            last = bisect_right(sizes, key.num_tokens * 5 // 4) - 1
        most = self.max_num_seqs if key.num_reqs else 0
        return [
            replace(key, num_tokens=size, num_reqs=size // uniform if uniform else min(size, most))
            for size in sizes[first : last + 1]
            if size < 2 * key.num_tokens
        ]

    def valid_keys(self) -> list[tuple[CUDAGraphMode, BatchDescriptor]]:
        """All without adapters and tails, those of small steps first: one row's, which the first request needs, then the rest."""
        found = [
            (CUDAGraphMode.FULL, BatchDescriptor(size, size // length, length))
            for length, sizes in self.decode_sizes.items()
            for size in sizes
        ]
        found += [(CUDAGraphMode.FULL, BatchDescriptor(size, 1, is_prompt=True)) for size in self.prompt_sizes]
        if self.mode is CUDAGraphMode.FULL:
            mixed = [BatchDescriptor(size, min(size, self.max_num_seqs), 0) for size in self.mixed_sizes]
            found += [(CUDAGraphMode.FULL, key) for key in mixed]
        else:
            found += [(CUDAGraphMode.PIECEWISE, BatchDescriptor(size, 0)) for size in self.mixed_sizes]
        return sorted(found, key=lambda item: item[1].num_tokens)


def default_sizes(most: int) -> list[int]:
    """Powers of two to 8, then steps of about an eighth: little padding, few graphs. `most` itself is one."""
    return _ending_in(most, [*_SMALL_SIZES, *range(576, 1025, 64), *range(1152, 4097, 128)])


def mixed_sizes(most: int) -> list[int]:
    """The same, above 512 tokens in steps of a sixteenth: there padding is device time."""
    large = (*range(544, 1025, 32), *range(1088, 2049, 64), *range(2176, 4097, 128))
    return _ending_in(most, [*_SMALL_SIZES, *large, *range(4352, 8193, 256), *range(8704, 16385, 512)])


def _ending_in(most: int, sizes: list[int]) -> list[int]:
    return [*(size for size in sizes if size < most), most]


def _up_to(most: int, sizes: Iterable[int]) -> list[int]:
    return sorted({size for size in sizes if size <= most})


def _padded(sizes: Sequence[int], count: int) -> int | None:
    place = bisect_left(sizes, count)
    return sizes[place] if place < len(sizes) and count > 0 else None
