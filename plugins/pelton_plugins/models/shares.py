"""The heads, groups or channels of a layer that are a rank's, and what it has of a checkpoint's tensors by them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pelton.errors import ConfigError
from pelton.layers.linear import split_heads
from pelton.quantization.interface import LinearShard

if TYPE_CHECKING:
    from pelton.model.build import BuildConfig


@dataclass(frozen=True, slots=True)
class Share:
    """This rank's [start, stop) of `total` things that lie one after another."""

    total: int
    start: int
    stop: int

    @classmethod
    def whole(cls, total: int) -> Share:
        return cls(total, 0, total)

    @classmethod
    def split(cls, total: int, what: str, config: BuildConfig) -> Share:
        """An equal part each. what: the field with `total`, for the error of one that does not divide."""
        count, rank = config.parallel.share(total, what), config.parallel.rank
        return cls(total, rank * count, (rank + 1) * count)

    @classmethod
    def uneven(cls, total: int, config: BuildConfig) -> Share:
        """Parts that differ by one at most, of at least as many things as there are ranks."""
        rank, size = config.parallel.rank, config.parallel.size
        if total < size:
            raise ConfigError(
                f"tensor_parallel_size is {size}, and there are {total} experts, of which each rank holds some (enable_expert_parallel). "
                f"Use at most {total} ranks."
            )
        return cls(total, total * rank // size, total * (rank + 1) // size)

    @classmethod
    def copied(cls, total: int, what: str, config: BuildConfig) -> Share:
        """The same, but where there are fewer of them than ranks several ranks have a copy of one."""
        return cls(total, *split_heads(total, config.parallel.rank, config.parallel.size, what))

    @property
    def count(self) -> int:
        return self.stop - self.start

    def times(self, size: int) -> Share:
        """Rows of things that have `size` of them each."""
        return Share(self.total * size, self.start * size, self.stop * size)


def row_shard(name: str, rows: Share, num_cols: int) -> LinearShard:
    """This rank's rows of a matrix."""
    return LinearShard(name, rows.total, num_cols, (rows.start, rows.stop), (0, num_cols))


def shards_of(name: str, parts: Sequence[Share], num_cols: int) -> list[LinearShard]:
    """A matrix whose parts lie below each other: this rank's rows of each. Rows that follow each other are one shard."""
    total, start, ranges = sum(part.total for part in parts), 0, []
    for part in parts:
        ranges.append((start + part.start, start + part.stop))
        start += part.total
    return [LinearShard(name, total, num_cols, rows, (0, num_cols)) for rows in _joined(ranges)]


def shards_by_group(name: str, groups: Share, parts: Sequence[Share], num_cols: int) -> list[list[LinearShard]]:
    """A matrix in which the rows of each group follow each other, those of several things: for each thing its rows of this rank's groups.
    parts: of a thing's rows in a group those of this rank."""
    rows, start, found = sum(part.total for part in parts), 0, []
    for part in parts:
        ranges = (
            (group * rows + start + part.start, group * rows + start + part.stop)
            for group in range(groups.start, groups.stop)
        )
        found.append([LinearShard(name, groups.total * rows, num_cols, own, (0, num_cols)) for own in ranges])
        start += part.total
    return found


def _joined(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for start, stop in ranges:
        if found and found[-1][1] == start:
            start = found.pop()[0]
        found.append((start, stop))
    return found
