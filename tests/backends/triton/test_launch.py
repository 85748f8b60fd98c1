"""A key finds its compiled kernel; another alignment is another key."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl
from pelton_programs import run_program


@triton.jit
def shift_kernel(x, out, amount, SIZE: tl.constexpr, SIGN: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out + at, tl.load(x + at) + amount * SIGN)


class FakeKernel:
    """Compiles once per (first argument, constants), and writes down who was called."""

    params = tuple(SimpleNamespace(name=name, is_constexpr=name.isupper()) for name in ("x", "A", "B"))

    def __init__(self):
        self.calls = []

    def __getitem__(self, grid):
        def launch(*args, **constants):
            self.calls.append(("looked up", grid, args, constants))
            return FakeCompiled(self.calls)

        return launch


class FakeCompiled:
    def __init__(self, calls):
        self.calls = calls

    def __getitem__(self, grid):
        return lambda *args: self.calls.append(("compiled", grid, args))


def test_the_second_call_with_a_key_goes_to_the_compiled_kernel():
    from pelton_backends.triton.launch import Launcher

    kernel = FakeKernel()
    launch = Launcher(kernel)
    launch("key", (3,), (1.0,), {"B": 5, "A": 4}, num_warps=2)
    launch("key", (7, 2), (2.0,), {"B": 5, "A": 4}, num_warps=2)
    launch("other", (1,), (1.0,), {"B": 5, "A": 4})
    assert kernel.calls == [
        ("looked up", (3,), (1.0,), {"B": 5, "A": 4, "num_warps": 2}),
        ("compiled", (7, 2, 1), (2.0, 4, 5)),  # constants in the kernel's order, three axes of the grid
        ("looked up", (1,), (1.0,), {"B": 5, "A": 4}),
    ]


def test_a_known_kernel_is_not_launched_where_kernels_are_only_compiled():
    from pelton.platform.compiling import compile_only
    from pelton_backends.triton.launch import Launcher

    kernel = FakeKernel()
    launch = Launcher(kernel)
    launch("key", (3,), (1.0,), {"B": 5, "A": 4})
    is_set = compile_only.set(True)
    try:
        launch("key", (3,), (1.0,), {"B": 5, "A": 4})
    finally:
        compile_only.reset(is_set)
    assert [call[0] for call in kernel.calls] == ["looked up"]


def test_constants_come_last():
    from pelton_backends.triton.launch import Launcher

    kernel = FakeKernel()
    kernel.params = kernel.params[::-1]
    with pytest.raises(AssertionError, match="constants come last"):
        Launcher(kernel)


def test_alignment_tells_which_tensor_is_off():
    from pelton_backends.triton.launch import alignment

    memory = torch.zeros(64)
    first = memory[(-memory.data_ptr() // 4) % 4 :]
    assert alignment(first, None, first[4:]) == 0
    assert alignment(first, first[1:]) == (0, 4)
    assert alignment(first[1:], first) == (4, 0)


def test_launches_give_what_the_kernel_gives(device):
    from pelton_backends.triton.launch import Launcher, alignment

    launch = Launcher(shift_kernel)
    x = torch.arange(40.0, device=device)
    for start in (0, 1, 0, 4, 1):
        for amount in (1, 5, 16):
            out = torch.zeros(16, device=device)
            part = x[start:]
            key = (alignment(part, out), amount == 1, amount % 16 == 0)
            launch(key, (1,), (part, out, amount), {"SIZE": 16, "SIGN": -1}, num_warps=1)
            assert torch.equal(out, part[:16] - amount)


KERNELS = """
import triton
import triton.language as tl

FACTOR = tl.constexpr({factor})

@triton.jit
def leaf(x):
    return x * FACTOR

@triton.jit
def middle(x):
    return leaf(x) + tl.sum(x)

@triton.jit
def outer(x):
    return middle(x) - 1

@triton.jit
def leaf_kernel(pointer):
    tl.store(pointer, leaf(tl.load(pointer)))

@triton.jit
def deep_kernel(pointer):
    tl.store(pointer, outer(tl.load(pointer)))
"""


def test_the_key_of_a_kernel_is_the_same_whatever_was_hashed_before(tmp_path: Path) -> None:
    """Else a process compiles again what another has left in the cache. It holds what functions three calls away are made of."""
    found = []
    for factor in (3, 4):
        (tmp_path / "kernels.py").write_text(KERNELS.format(factor=factor))
        first, second = run_program("pelton_kernel_keys.py", str(tmp_path / "kernels.py"))
        assert first == second
        found.append(first)
    assert found[0].keys() == found[1].keys() and not set(found[0].values()) & set(found[1].values())
