import shutil

import pytest

from pelton.errors import ConfigError
from pelton_backends.native import library
from pelton_backends.native.build import COMPILERS
from pelton_backends.native.isa import ISAS


@pytest.fixture(params=[one.name for one in ISAS])
def isa(request):
    """Each instruction set that this CPU has, in use."""
    try:
        library.use_isa(request.param)
    except ConfigError:
        pytest.skip(f"this CPU has no {request.param}")
    yield request.param
    library.use_isa(None)


def pytest_collection_modifyitems(items):
    if any(shutil.which(name) for name in COMPILERS):
        return
    for item in items:
        if "backends/native" in str(item.path):
            item.add_marker(pytest.mark.skip(reason="no C compiler on the PATH"))
