"""The same model with every weight as F32: the reference that quantised files are judged by.

Reads with the `gguf` package and decodes with ggml, so it is independent of our loader and decoders.

    python tools/dequantise.py IN.gguf OUT.gguf
"""

from __future__ import annotations

import argparse
import struct
import sys
from pathlib import Path

import gguf
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.ggml import dequantise

__all__ = ["dequantise_file"]

ALIGNMENT = 32


def dequantise_file(source: str | Path, target: str | Path) -> Path:
    """Write `source` with all tensors as F32 (integers keep their type); metadata is copied byte for byte."""
    reader = gguf.GGUFReader(source)
    first = min(tensor.field.offset for tensor in reader.tensors)
    f32 = int(gguf.GGMLQuantizationType.F32)
    infos = bytearray()
    offset = 0
    for tensor in reader.tensors:
        name = tensor.name.encode()
        shape = [int(n) for n in tensor.shape]
        infos += (
            struct.pack("<Q", len(name)) + name + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, f32, offset)
        )
        offset += -(-int(np.prod(shape)) * 4 // ALIGNMENT) * ALIGNMENT
    with open(target, "wb") as file:
        file.write(np.asarray(reader.data[:first]).tobytes())
        file.write(infos)
        file.write(bytes(-file.tell() % ALIGNMENT))
        for tensor in reader.tensors:
            n = int(tensor.shape[0])
            rows = tensor.data.view(np.uint8).reshape(int(tensor.n_elements) // n, -1)
            file.write(dequantise(rows, tensor.tensor_type, n).tobytes())
            file.write(bytes(-file.tell() % ALIGNMENT))
    return Path(target)


def main() -> None:
    """Convert one file."""
    parser = argparse.ArgumentParser(description="Write a GGUF with all weights as F32.")
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    args = parser.parse_args()
    print(dequantise_file(args.source, args.target))


if __name__ == "__main__":
    main()
