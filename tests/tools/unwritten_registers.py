"""Look through all kernels of a cache of Triton's for registers that are read and never written (`tests/support/pelton_sass.py` says why).

python tests/tools/unwritten_registers.py ~/.triton/cache        after tests or benchmarks on a GPU
"""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from triton import knobs

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from pelton_sass import INSTRUCTION, unwritten


def look(path: Path) -> tuple[Path, set[int]]:
    text = subprocess.run(
        [knobs.nvidia.nvdisasm.path, "-c", str(path)], check=True, capture_output=True, text=True
    ).stdout
    return path, unwritten([(name, operands) for _, name, operands in INSTRUCTION.findall(text)])


def main(folder: str) -> int:
    paths = sorted(Path(folder).rglob("*.cubin"))
    with ThreadPoolExecutor() as pool:
        found = [(path, registers) for path, registers in pool.map(look, paths) if registers]
    for path, registers in found:
        print(f"{path}: {', '.join(f'UR{register}' for register in sorted(registers))}")
    print(f"{len(paths)} kernels, {len(found)} of them read what nothing was written to")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
