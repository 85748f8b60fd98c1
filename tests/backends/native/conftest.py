import shutil

import pytest
from pelton_isas import AVAILABLE, DIFFERENT, WIDTHS, in_use

from pelton_backends.native.build import COMPILERS


@pytest.fixture(params=DIFFERENT)
def isa(request):
    """Each instruction set whose kernels differ, in use."""
    yield from in_use(request.param)


def pytest_collection_modifyitems(config, items):
    own = [item for item in items if "backends/native" in str(item.path)]
    dropped = {item for item in own if _is_float16_again(getattr(item, "callspec", None), item.path.stem)}
    if dropped:
        config.hook.pytest_deselected(items=[*dropped])
        items[:] = [item for item in items if item not in dropped]
    if any(shutil.which(name) for name in COMPILERS):
        return
    for item in own:
        item.add_marker(pytest.mark.skip(reason="no C compiler on the PATH"))


def _is_float16_again(spec, file):
    """Libraries for float16 differ by the width of a vector, which products show, and in quant.c by the best set."""
    if spec is None or str(spec.params.get("dtype")).removeprefix("torch.") != "float16" or "isa" not in spec.params:
        return False
    sets = {"test_linear": WIDTHS, "test_quant": AVAILABLE[-1:]}.get(file, WIDTHS[-1:])
    return spec.params["isa"] not in sets
