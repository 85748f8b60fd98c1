"""Keys of the same kernels, hashed in two orders: a line of JSON for each. A program of its own: other tests interpret kernels."""

from __future__ import annotations

import importlib.util
import json
import sys
from types import ModuleType

from pelton.platform.compiling import hash_callees_first


def load_again() -> ModuleType:
    """The module of the kernels, with nothing hashed yet."""
    spec = importlib.util.spec_from_file_location("kernels", sys.argv[1])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


sys.dont_write_bytecode = (
    True  # Python takes an old .pyc for a file of the same size that was written in the same second
)
for order in (("deep_kernel", "leaf_kernel"), ("leaf_kernel", "deep_kernel")):
    module = load_again()
    for name in order:
        hash_callees_first(getattr(module, name))
    print(json.dumps({name: getattr(module, name).hash for name in sorted(order)}))
