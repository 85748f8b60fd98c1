"""Random numbers as a pure function of (seed, position): no generator state, nothing shared between rows.

The mixing function is splitmix64's (Steele, Lea, Flood, OOPSLA 2014), in int64 torch ops, whose products wrap alike
on every device.
"""

from __future__ import annotations

from torch import Tensor

_BITS = 48  # of the result: u <= 1 - 2**-49, so that u * total stays below total in float64


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


_STEP = _signed(0x9E3779B97F4A7C15)
_FIRST = _signed(0xBF58476D1CE4E5B9)
_SECOND = _signed(0x94D049BB133111EB)


def _shift_right(value: Tensor, count: int) -> Tensor:
    """Logical: torch's >> on int64 brings the sign along."""
    return (value >> count) & ((1 << (64 - count)) - 1)


def _mix(value: Tensor) -> Tensor:
    value = (value ^ _shift_right(value, 30)) * _FIRST
    value = (value ^ _shift_right(value, 27)) * _SECOND
    return value ^ _shift_right(value, 31)


def random_bits(seeds: Tensor, positions: Tensor) -> Tensor:
    """seeds, positions [n] int64 -> [n] int64, 64 random bits each."""
    return _mix(_mix(seeds + _STEP) ^ _mix(positions * _STEP + _FIRST))


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """seeds, positions [n] int64 -> [n] float64 in (0, 1), never an end of it."""
    return (_shift_right(random_bits(seeds, positions), 64 - _BITS).double() + 0.5) * 2.0**-_BITS
