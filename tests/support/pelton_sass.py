"""Uniform registers that a kernel's instructions read and none of them writes: a fault of the assembler.

ptxas 12.8 makes such code where products of tensor cores read one place of shared memory in two swizzles (a chunk of 16 or 32 numbers
behind one of others): the second's descriptors are sums of a register that holds nothing, and the product reads anywhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Z0-9_.]*)\s*([^;]*)", re.MULTILINE)
"""In nvdisasm's text: place, name with its suffixes, operands."""
WRITERS = ("U", "S2UR", "R2UR", "CS2UR", "REDUX", "VOTEU", "LDCU")
"""Beginnings of names of instructions whose first operand, where it is a uniform register, is written."""
REGISTER = re.compile(r"\bUR(\d+)\b")


def unwritten(code: Iterable[tuple[str, str]]) -> set[int]:
    """Numbers of the registers. code: each instruction's name with its suffixes, and its operands."""
    written: set[int] = set()
    read: set[int] = set()
    for name, operands in code:
        first, _, others = operands.partition(",")
        target = re.fullmatch(r"\s*(?:UP\w+\s*,\s*)?UR(\d+)\s*", first)
        if target and name.startswith(WRITERS):
            number = int(target.group(1))
            written.update(range(number, number + width(name)))
            operands = others
        if name.startswith("HGMMA"):
            # Four registers: a's descriptor, and b's. A product whose a is in registers reads the second alone.
            parts = operands.split(",")
            has_a = "gdesc" not in parts[1]
            for number in map(int, re.findall(r"gdesc\[UR(\d+)\]", operands)):
                read.update(range(number + 2 if has_a else number, number + 4))
            operands = re.sub(r"gdesc\[UR\d+\]", "", operands)
        read.update(map(int, REGISTER.findall(operands)))
    return read - written


def width(name: str) -> int:
    """Registers that an instruction writes."""
    if ".128" in name:
        return 4
    return 2 if ".64" in name or ".WIDE" in name else 1
