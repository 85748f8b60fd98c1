"""Instruction sets that kernels are compiled for: which there are, and which this CPU and this compiler have."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

_AVX2 = ("avx2", "fma", "f16c")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512vl", "avx512dq")


@dataclass(frozen=True, slots=True)
class InstructionSet:
    """One that a library may be compiled for; csrc/common.h has its number."""

    name: str
    number: int
    features: tuple[str, ...] = ()
    """As the compiler's -m flags name them; Linux writes some of them with an underscore more."""
    has_bf16: bool = False
    """Products of bfloat16: models in bfloat16 do without most kernels in float32 arithmetic."""
    is_float16: bool = False
    """What csrc/ calls bf16 is float16."""

    @property
    def flags(self) -> tuple[str, ...]:
        kind = ("-DPELTON_FLOAT16",) if self.is_float16 else ()
        return (*(f"-m{feature}" for feature in self.features), f"-DPELTON_ISA={self.number}", *kind)

    def for_dtype(self, dtype: str) -> InstructionSet:
        """Return the set for a library whose numbers of 16 bits are of this dtype; they are bfloat16 where a model has float32 alone."""
        if dtype != "float16" or self.is_float16:
            return self
        below = next(one for one in reversed(ISAS) if one.number <= self.number and not one.has_bf16)
        return replace(below, is_float16=True)


ISAS = (
    InstructionSet("plain", 0),
    InstructionSet("avx2", 1, _AVX2),
    InstructionSet("avx2_vnni", 2, (*_AVX2, "avxvnni")),
    InstructionSet("avx512", 3, _AVX512),
    InstructionSet("avx512_vnni", 4, (*_AVX512, "avx512vnni")),
    InstructionSet("avx512_bf16", 5, (*_AVX512, "avx512vnni", "avx512bf16"), has_bf16=True),
)
"""From the slowest to the fastest."""


@cache
def cpu_features() -> frozenset[str]:
    """The first CPU's flags as Linux lists them, without underscores."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    listed = next((line for line in lines if line.startswith(("flags", "Features"))), ":")
    return frozenset(listed.partition(":")[2].replace("_", "").split())


def sets_of_cpu() -> Sequence[InstructionSet]:
    """Those that this CPU has, the slowest first."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return ISAS[:1]
    return [one for one in ISAS if cpu_features().issuperset(one.features)]


def probe_command(compiler: str, one: InstructionSet) -> list[str]:
    """Succeeds where the compiler knows the set."""
    return [compiler, *one.flags, "-E", "-x", "c", os.devnull, "-o", os.devnull]
