"""Ceilings of this machine's cores: float32 products a second, and bytes read from memory a second.

`python -m pelton_backends.native.ceiling` prints both, `--json` as JSON; `--isa` takes another instruction set; `--follow` measures
once for each line of its input, so that a run can be told from what the machine did meanwhile.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pelton.errors import ConfigError, EngineError
from pelton_backends.native import library
from pelton_backends.native.build import available_sets

if TYPE_CHECKING:
    from pelton_backends.native.library import Kernels

READ_BYTES = 256 << 20
"""More than most CPUs' last cache holds."""


def gflops(isa: str | None = None) -> float:
    """Float32 multiplications and additions a second of all threads, in 1e9, with this instruction set (None: the one in use)."""
    return float(_kernels(isa).fma_ceiling())


def read_gb_s(isa: str | None = None) -> float:
    """Bytes that all threads read from memory a second, in 1e9. Raises `EngineError` where there is too little memory."""
    found = float(_kernels(isa).read_ceiling(READ_BYTES))
    if not found:
        raise EngineError(f"No memory for {READ_BYTES >> 20} MiB to read. Give the process more memory.")
    return found


def _kernels(isa: str | None) -> Kernels:
    found = library.isa_in_use() if isa is None else next((one for one in available_sets() if one.name == isa), None)
    if found is None:
        raise ConfigError(
            f"Instruction set {isa!r}: this machine has {', '.join(one.name for one in available_sets())}."
        )
    return library.kernels("ceiling", isa=found)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m pelton_backends.native.ceiling", description=__doc__)
    parser.add_argument("--isa", help="an instruction set, such as avx2; the best of this CPU by default")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--follow", action="store_true", help="measure once for each line of the standard input")
    options = parser.parse_args(arguments)
    for _ in sys.stdin if options.follow else range(1):
        print(_measured(options.isa, as_json=options.json), flush=True)


def _measured(isa: str | None, *, as_json: bool) -> str:
    speed, bandwidth, name = gflops(isa), read_gb_s(isa), isa or library.isa_in_use().name
    if as_json:
        return json.dumps({"isa": name, "gflops": speed, "read_gb_s": bandwidth})
    return f"{name}: {speed:.0f} GFLOP/s float32, {bandwidth:.1f} GB/s read"


if __name__ == "__main__":
    main()
