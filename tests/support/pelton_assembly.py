"""The few PTX instructions with which kernels decode weights, on the CPU: what they make of every code."""

from __future__ import annotations

from collections.abc import Callable

import torch


def permuted(word: int, other: int, selector: int) -> int:
    parts = word.to_bytes(4, "little") + other.to_bytes(4, "little")
    return int.from_bytes(bytes(parts[selector >> 4 * i & 7] for i in range(4)), "little")


def paired(result: Callable[..., torch.Tensor], dtype: torch.dtype = torch.bfloat16) -> Callable[..., int]:
    """As instructions of two numbers a register do it: rounded once."""

    def instruction(*registers: int) -> int:
        halves = torch.tensor(registers, dtype=torch.int64).to(torch.int32).view(dtype).view(-1, 2)
        return int(result(*halves.double()).to(dtype).view(torch.int32).item())

    return instruction


def combined(a: int, b: int, c: int, table: int) -> int:
    assert table == 0xE2
    return a & b | c & ~b


INSTRUCTIONS: dict[str, Callable[..., int]] = {
    "mov.b32": int,
    "prmt.b32": permuted,
    "lop3.b32": combined,
    "shl.b32": int.__lshift__,
    "shr.b32": int.__rshift__,
    "and.b32": int.__and__,
    "mad.lo.u32": lambda a, b, c: a * b + c,
    "cvt.u32.u16": int,
    "mul.bf16x2": paired(torch.mul),
    "fma.rn.bf16x2": paired(lambda a, b, c: a * b + c),
    "mul.f16x2": paired(torch.mul, torch.float16),
    "fma.rn.f16x2": paired(lambda a, b, c: a * b + c, torch.float16),
}


def run_assembly(text: str, registers: dict[str, int]) -> dict[str, int]:
    """Registers after instructions of PTX."""
    found = dict(registers)
    for instruction in text.strip("{ }").split(";"):
        name, _, rest = instruction.strip().partition(" ")
        places = [part.strip(" {}") for part in rest.split(",")]
        if name in ("", ".reg"):
            continue
        if name == "mov.b32" and len(places) == 3:  # a register to two halves
            found[places[0]], found[places[1]] = found[places[2]] & 0xFFFF, found[places[2]] >> 16
        else:
            values = [found[place] if place in found else int(place, 0) for place in places[1:]]
            found[places[0]] = INSTRUCTIONS[name](*values) & 0xFFFFFFFF
    return found


def as_number(bits: int, dtype: torch.dtype) -> float:
    return torch.tensor(bits, dtype=torch.int32).to(torch.int16).view(dtype).double().item()


def as_bfloat16(bits: int) -> float:
    return as_number(bits, torch.bfloat16)
