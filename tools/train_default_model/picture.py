"""The load of each expert in each layer as an SVG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

__all__ = ["expert_load"]

CELL, LEFT, TOP = 36, 70, 56


def expert_load(counts: Sequence[Sequence[int]], target: Path) -> None:
    """Write a table of cells, a layer a row: percent of the layer's routed tokens, darker for more."""
    n_expert = len(counts[0])
    width, height = LEFT + CELL * n_expert + 16, TOP + CELL * len(counts) + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{LEFT}" y="22" font-size="15">Share of the routed tokens by expert, in percent '
        f"(even: {100 / n_expert:.1f})</text>",
    ]
    for e in range(n_expert):
        x = LEFT + CELL * e + CELL // 2
        parts.append(f'<text x="{x}" y="{TOP - 8}" font-size="11" text-anchor="middle">{e}</text>')
    for layer, row in enumerate(counts):
        y = TOP + CELL * layer
        parts.append(f'<text x="8" y="{y + 22}" font-size="12">layer {layer}</text>')
        total = max(sum(row), 1)
        for e, count in enumerate(row):
            share = count / total
            strength = min(share * n_expert / 2.5, 1.0)
            red, green, blue = (round(255 - strength * span) for span in (215, 135, 55))
            ink = "white" if strength > 0.6 else "black"
            x = LEFT + CELL * e
            parts.append(f'<rect x="{x}" y="{y}" width="{CELL}" height="{CELL}" fill="rgb({red},{green},{blue})"/>')
            parts.append(
                f'<text x="{x + CELL // 2}" y="{y + 22}" font-size="11" text-anchor="middle" fill="{ink}">'
                f"{100 * share:.1f}</text>"
            )
    y = TOP + CELL * len(counts) + 24
    parts.append(f'<text x="{LEFT}" y="{y}" font-size="12">expert number above, held-out answers</text>')
    target.write_text("\n".join([*parts, "</svg>", ""]), encoding="utf-8")
