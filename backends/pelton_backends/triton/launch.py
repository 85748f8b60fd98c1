"""Launches, and such that cost the host little, for kernels that eager steps call once a layer.

`kernel[grid](...)` looks at every argument on each call to find what it has compiled for (28 us for prefill's arguments on the
H200 machine). Here the caller says in a key what that depends on, and later calls with the key go to the compiled kernel.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

from pelton.platform.compiling import compile_only, launch

if TYPE_CHECKING:
    from torch import Tensor


class Variant:
    """Launches of one kernel that have constants and options in common. Made by `Launcher.variant`."""

    def __init__(
        self, kernel: Any, values: tuple[Any, ...], constants: dict[str, Any], options: dict[str, Any]
    ) -> None:
        self._kernel, self._values, self._constants, self._options = kernel, values, constants, options
        self._compiled: dict[Hashable, Any] = {}

    def __call__(self, key: Hashable, grid: tuple[int, ...], args: tuple[Any, ...]) -> None:
        """`key`: as for `Launcher`, of what the variant's own key leaves open."""
        compiled = self._compiled.get(key)
        if compiled is not None:
            compiled[(*grid, 1, 1)[:3]](*args, *self._values)
            return
        compiled = launch(self._kernel, grid, *args, **self._constants, **self._options)
        if compiled is not None:
            self._compiled[key] = compiled


class Launcher:
    """One kernel whose constants are its last parameters."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._compiled: dict[Hashable, tuple[Any, tuple[Any, ...]]] = {}
        self._variants: dict[Hashable, Variant] = {}
        params = getattr(kernel, "params", ())  # the interpreter's kernels have none, and compile nothing
        self._constants = tuple(param.name for param in params if param.is_constexpr)
        assert all(param.is_constexpr for param in params[len(params) - len(self._constants) :]), "constants come last"

    def __call__(
        self, key: Hashable, grid: tuple[int, ...], args: tuple[Any, ...], constants: dict[str, Any], **options: Any
    ) -> None:
        """`key` tells apart what Triton compiles separately: constants and options, the device, types, the alignment of
        addresses to 16 bytes (`alignment`), and which specialised integers are 1 or multiples of 16."""
        known = self._compiled.get(key)
        if known is not None:
            if compile_only.get():  # a product would send rows to another rank, where no sum takes them
                return
            compiled, values = known
            compiled[(*grid, 1, 1)[:3]](*args, *values)
            return
        compiled = launch(self._kernel, grid, *args, **constants, **options)
        if compiled is not None:
            self._compiled[key] = compiled, tuple(constants[name] for name in self._constants)

    def variant(self, key: Hashable, constants: dict[str, Any], **options: Any) -> Variant:
        """For a caller that launches again and again with the same constants and options: it holds the variant, and hashes no
        long key. `key` tells apart what Triton compiles separately, constants and options aside; equal ones share a variant."""
        whole = key, *constants.items(), *options.items()
        found = self._variants.get(whole)
        if found is None:
            values = tuple(constants[name] for name in self._constants) if self._constants else ()
            found = self._variants[whole] = Variant(self._kernel, values, constants, options)
        return found


def alignment(*tensors: Tensor | None) -> Hashable:
    """0 when all addresses are multiples of 16, else what each is past one."""
    addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
    together = 0
    for address in addresses:
        together |= address
    return tuple(address & 15 for address in addresses) if together & 15 else 0
