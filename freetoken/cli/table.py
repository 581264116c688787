"""Results as a Markdown table, aligned for reading in a terminal too."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["markdown"]


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The table's lines; all columns stand to the right."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    lines = [
        f"| {' | '.join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))} |" for row in [head, *rows]
    ]
    lines.insert(1, "| " + " | ".join("-" * (width - 1) + ":" for width in widths) + " |")
    return lines
