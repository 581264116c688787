"""`ft convert` as a tool: a GGUF model as FTW, `python tools/convert.py IN.gguf OUT.ftw`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from freetoken.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["convert", *sys.argv[1:]]))
