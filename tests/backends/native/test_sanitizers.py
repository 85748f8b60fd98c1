"""The kernels' tests once more, fewer of each grid, with addresses and undefined behaviour watched, in a process of their own."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from pelton_isas import AVAILABLE

from pelton_backends.native.build import build_library
from pelton_backends.native.isa import ISAS

FLAGS = ["-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer", "-g1"]
HERE = Path(__file__).parent
SETS = {AVAILABLE[0], AVAILABLE[-1]}
"""The narrowest vectors and the set that this CPU uses: those between have the same loops over the same places."""
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
sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", "--covering=2", *{tests!r}]))
"""


def runtime(name):
    """The sanitizer's library beside the compiler; None where it has none."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    found = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True).stdout.strip()
    return found if os.path.isabs(found) else None


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(sys.platform != "linux", reason="LD_PRELOAD of libasan")
def test_kernels_touch_only_what_is_theirs():
    asan = runtime("libasan.so")
    if asan is None:
        pytest.skip("the compiler has no libasan")
    for one in ISAS:
        if one.name in SETS:
            build_library(one, extra_flags=FLAGS)  # here: behind LD_PRELOAD the compiler takes twice as long
    code = RUN.format(sets=tuple(sorted(SETS)), flags=FLAGS, tests=[str(HERE / name) for name in FILES])
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={
            **os.environ, "LD_PRELOAD": asan, "OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive",
            "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0", "UBSAN_OPTIONS": "print_stacktrace=1",
        },
        cwd=HERE.parents[2], capture_output=True, text=True, timeout=880,
    )  # fmt: skip
    assert result.returncode == 0, (result.stdout + result.stderr)[-6000:]
