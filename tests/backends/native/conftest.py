import shutil

import pytest
from pelton_isas import DIFFERENT, in_use

from pelton_backends.native.build import COMPILERS


@pytest.fixture(params=DIFFERENT)
def isa(request):
    """Each instruction set whose kernels differ, in use."""
    yield from in_use(request.param)


def pytest_collection_modifyitems(items):
    if any(shutil.which(name) for name in COMPILERS):
        return
    for item in items:
        if "backends/native" in str(item.path):
            item.add_marker(pytest.mark.skip(reason="no C compiler on the PATH"))
