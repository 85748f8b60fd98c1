"""Test C kernels for instruction sets that this CPU lacks: its intrinsics in plain C (emulated_avx512.h), the rest by the compiler.

    python tests/tools/emulated_sets.py                                        # every set, all files: some minutes
    python tests/tools/emulated_sets.py --sets avx512_bf16 -k encoder          # what follows goes to pytest

For x86-64 with AVX2 and GCC. It shows that what is computed is right, and nothing of its speed. What a library does by threads or
memory is the same in every set.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

import pytest

from pelton_backends.native import isa
from pelton_backends.native.isa import ISAS, InstructionSet

HERE = Path(__file__).parent
NATIVE = HERE.parent / "backends" / "native"
FILES = (
    "allowed_logits", "attention", "encoder", "layer_norm", "linear", "lora", "moe", "quant", "rope", "sampling", "step",
)  # fmt: skip
EMULATED = ("avx2_vnni", "avx512", "avx512_vnni", "avx512_bf16")


class EmulatedSet(InstructionSet):
    """Compiled for AVX2, with the sources of another."""

    @property
    def flags(self) -> tuple[str, ...]:
        header = str(HERE / "emulated_avx512.h")
        # Not optimized: that takes longer than the tests do.
        return ("-O0", "-mavx2", "-mfma", "-mf16c", "-Wno-psabi", f"-DPELTON_ISA={self.number}", "-include", header)


def emulate(names: list[str]) -> None:
    """Let these be the sets that this CPU has, before anything asks which."""
    sets = tuple(EmulatedSet(one.name, one.number) for one in ISAS if one.name in names)
    isa.ISAS = sets
    isa.sets_of_cpu = lambda: sets


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", nargs="+", choices=EMULATED, default=[*EMULATED])
    parser.add_argument(
        "--files", nargs="+", choices=FILES, default=[*FILES], help="tests of these, tests/backends/native/test_*.py"
    )
    own, others = parser.parse_known_args()
    if not isa.cpu_features().issuperset(isa.ISAS[1].features):
        parser.error("this CPU has no AVX2")
    emulate(own.sets)
    sys.path[:0] = [str(NATIVE), str(HERE.parent / "support")]
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache  # libraries that would be slow ones of the same name
        chosen = [str(NATIVE / f"test_{name}.py") for name in own.files]
        return pytest.main(["-q", "-p", "no:cacheprovider", "--timeout", "1800", "--covering", "2", *chosen, *others])


if __name__ == "__main__":
    sys.exit(main())
