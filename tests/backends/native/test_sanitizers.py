"""The kernels' tests once more, few of each grid, with addresses and undefined behaviour watched, in a process of their own."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pelton_covering import covering
from pelton_isas import AVAILABLE

from pelton_backends.native.build import GROUPS, build_libraries
from pelton_backends.native.isa import ISAS

FLAGS = ["-O0", "-fsanitize=address,undefined"]
TRAPS = [
    "-fsanitize-undefined-trap-on-error"
]  # undefined behaviour ends the process: a third less to compile than words about it
WORDS = ["-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer", "-g1"]
HERE = Path(__file__).parent
SETS = {AVAILABLE[0], AVAILABLE[-1]}
"""The narrowest vectors and the set that this CPU uses: those between have the same loops over the same places."""
TESTED = [group for group in GROUPS if group not in ("lora", "ceiling")]
"""What these files call."""
FILES = (
    "test_attention.py", "test_encoder.py", "test_layer_norm.py", "test_linear.py", "test_quant.py", "test_rope.py",
    "test_sampling.py",
)  # fmt: skip
RUN = """
import sys, pytest
from pelton_backends.native import build
available = build.available_sets
build.available_sets = lambda: [one for one in available() if one.name in {sets!r}]
from pelton_backends.native import library
library.EXTRA_FLAGS[:] = {flags!r}
sys.path[:0] = {paths!r}
from test_sanitizers import Few
sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", "--covering=0", *{tests!r}], plugins=[Few()]))
"""


class Few:
    """Of each grid so many cases that every value is met, on one of the sets in turn; two seeds, no law of random numbers, no large
    vocabulary."""

    @pytest.hookimpl(wrapper=True)
    def pytest_collection_modifyitems(self, items):
        yield
        grids = {}
        for item in items:
            if self._is_kept(item):
                grids.setdefault(item.nodeid.partition("[")[0], []).append(item)
        items[:] = [item for grid in grids.values() for item in self._thinned(grid)]

    def _is_kept(self, item):
        parameters = _parameters(item)
        is_large = parameters.get("vocab", 0) > 10_000 or item.originalname in (
            "test_at_size",
            "test_law_by_chi_square",
        )
        # From 384 rows on the threads' chunks of whole layers have 128 rows, with one thread as with three, whatever the vectors
        # and the weights.
        once = {"threads": 3, "isa": AVAILABLE[-1], "inner": 100}
        has_same_chunks = sum(parameters.get("lengths", [0])) >= 384 and any(
            parameters.get(name, value) != value for name, value in once.items()
        )
        # Kernels for float16 are those for bfloat16 but for what makes float32 of a number in a register, and back: C of its own in
        # the first set alone.
        is_float16 = any("float16" in (str(one), getattr(one, "dtype", "")) for one in parameters.values())
        is_float16 |= parameters.get("dtype") is torch.float16
        is_float16_again = is_float16 and (item.path.name != "test_linear.py" or parameters.get("isa") != AVAILABLE[0])
        return not is_large and not has_same_chunks and not is_float16_again and parameters.get("seed", 0) < 2

    def _thinned(self, grid):
        names = sorted(_parameters(grid[0]).keys() - {"isa"})
        same = {}
        for item in grid:
            same.setdefault(tuple(id(_parameters(item)[name]) for name in names), []).append(item)
        cases = list(same)
        chosen = [same[cases[index]] for index in (covering(cases, 1) if names else [0])]
        return [sets[turn % len(sets)] for turn, sets in enumerate(chosen)]


def _parameters(item):
    return item.callspec.params if hasattr(item, "callspec") else {}


def runtime(name):
    """The sanitizer's library beside the compiler; None where it has none."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    found = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True).stdout.strip()
    return found if os.path.isabs(found) else None


@pytest.mark.slow
@pytest.mark.timeout(900)  # half a minute of work, ten times as long beside other programs
@pytest.mark.skipif(sys.platform != "linux", reason="LD_PRELOAD of libasan")
def test_kernels_touch_only_what_is_theirs():
    asan = runtime("libasan.so")
    if asan is None:
        pytest.skip("the compiler has no libasan")
    result = run_watched(asan, [*FLAGS, *TRAPS])
    if result.returncode:
        result = run_watched(asan, [*FLAGS, *WORDS])
        assert result.returncode == 0, (result.stdout + result.stderr)[-6000:]
        pytest.fail("it failed once, and not when it was asked for words")


def run_watched(asan, flags):
    for one in ISAS:  # here: behind LD_PRELOAD the compiler takes twice as long
        if one.name in SETS:
            build_libraries(one, TESTED, extra_flags=flags)
        if one.name == AVAILABLE[0]:
            build_libraries(one.for_dtype("float16"), extra_flags=flags)
    paths = [str(HERE), str(HERE.parents[1] / "support")]
    code = RUN.format(paths=paths, sets=tuple(sorted(SETS)), flags=flags, tests=[str(HERE / name) for name in FILES])
    return subprocess.run(
        [sys.executable, "-c", code],
        env={
            **os.environ, "LD_PRELOAD": asan, "OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive",
            "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0", "UBSAN_OPTIONS": "print_stacktrace=1",
        },
        cwd=HERE.parents[2], capture_output=True, text=True, timeout=880,
    )  # fmt: skip
