"""Plain-text tables: columns padded to their widest cell, the last one left as it is."""

from __future__ import annotations

from collections.abc import Sequence


def format_table(header: Sequence[str], rows: Sequence[Sequence[object]], *, indent: str = "") -> str:
    """One line a row below an upper-case header."""
    cells = [[name.upper() for name in header], *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    return "\n".join(
        indent + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells
    )
