import shutil

import pytest

from pelton_backends.native import library
from pelton_backends.native.build import COMPILERS


@pytest.fixture(params=library.ISAS)
def isa(request):
    """Each instruction set that this CPU has, forced."""
    kernels = library.kernels()
    if not kernels.force_isa(request.param):
        pytest.skip(f"this CPU has no {request.param}")
    yield request.param
    kernels.force_isa(None)


def pytest_collection_modifyitems(items):
    if any(shutil.which(name) for name in COMPILERS):
        return
    for item in items:
        if "backends/native" in str(item.path):
            item.add_marker(pytest.mark.skip(reason="no C compiler on the PATH"))
