"""Write native/src/grids_data.h: the code words of ggml's IQ2 and IQ3 types, as facts taken from the gguf package.

    python -m tools.grids > native/src/grids_data.h

A code word stands for 8 (IQ2) or 4 (IQ3) magnitudes, each one of a few levels; the file holds the levels' numbers, 2 or
3 bits each, the first value lowest.
"""

from __future__ import annotations

import gguf.quants
import numpy as np

__all__ = ["main", "text"]

NAMES = ("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S")
PER_LINE = 16
HEAD = """\
// grids_data.h - written by tools/grids.py, not by hand: levels and code words of ggml's IQ2 and IQ3 types.
#ifndef FT_GRIDS_DATA_H
#define FT_GRIDS_DATA_H
#include <cstdint>

namespace ft {
"""
TAIL = """
}  // namespace ft
#endif
"""


def array(kind: str, name: str, values: list[int]) -> str:
    """One C++ array."""
    lines = [", ".join(map(str, values[i : i + PER_LINE])) for i in range(0, len(values), PER_LINE)]
    return f"\nconstexpr {kind} {name}[{len(values)}] = {{\n    " + ",\n    ".join(lines) + "};\n"


def text() -> str:
    """The whole header."""
    parts = [HEAD]
    for name in NAMES:
        quant = getattr(gguf.quants, name)
        quant.init_grid()
        levels = np.array(quant.grid_map, dtype=np.int64)
        numbers = np.searchsorted(levels, quant.grid.astype(np.int64).reshape(quant.grid_shape))
        width = 2 if len(levels) <= 4 else 3
        words = (numbers << (width * np.arange(numbers.shape[1]))).sum(axis=1)
        parts += [
            array("uint8_t", f"kLevels{name}", levels.tolist()),
            array("uint16_t", f"kWords{name}", words.tolist()),
        ]
    return "".join([*parts, TAIL])


def main() -> None:
    """Print it."""
    print(text(), end="")


if __name__ == "__main__":
    main()
