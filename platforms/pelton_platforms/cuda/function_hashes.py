"""Keys of compiled kernels that do not depend on what was launched before: every process finds what another one compiled."""

from __future__ import annotations

from typing import Any

from triton.runtime.jit import DependenciesFinder

_update_hash = DependenciesFinder._update_hash


def _update_hash_of_hashed(self: Any, function: Any) -> None:
    _ = function.cache_key
    _update_hash(self, function)


def hash_callees_first() -> None:
    """From now on. Triton 3.6 makes the key of a compiled kernel of the global values of all functions that it calls, but reads them
    before it hashes a function, which finds them out. Those of a function that was not hashed yet would be left out."""
    DependenciesFinder._update_hash = _update_hash_of_hashed
