"""The kernels' tests once more, fewer of each grid, with addresses and undefined behaviour watched, in a process of their own."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
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
sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", "--covering=2", *{tests!r}], plugins=[Few()]))
"""


class Few:
    """Of the cases that are left: two seeds, no law of random numbers, no large vocabulary; each once, on one of the sets in turn."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items):
        """Before grids are thinned."""
        items[:] = [item for item in items if self._is_kept(item)]

    def _is_kept(self, item):
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
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
        return not is_large and not has_same_chunks and parameters.get("seed", 0) < 2

    def pytest_collection_finish(self, session):
        turns = {}
        for item in session.items:
            if "isa" in getattr(item, "callspec", SimpleNamespace(params={})).params:
                others = tuple((name, id(value)) for name, value in item.callspec.params.items() if name != "isa")
                turns.setdefault(item.nodeid.partition("[")[0], {}).setdefault(others, []).append(item)
        left_out = set()
        for cases in turns.values():
            for turn, same in enumerate(cases.values()):
                left_out |= {id(item) for item in same} - {id(same[turn % len(same)])}
        session.items[:] = [item for item in session.items if id(item) not in left_out]


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
    for one in ISAS:
        if one.name in SETS:
            build_libraries(one, TESTED, extra_flags=flags)  # here: behind LD_PRELOAD the compiler takes twice as long
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
