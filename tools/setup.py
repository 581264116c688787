"""Make a virtual environment and install the project into it, with progress. Called by the Makefile.

Standard library only: it runs before anything is installed. Every step's full output goes to `build/setup.log`; the
screen shows one line a step, and the counter of the compiler for the step that takes minutes.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOG = ROOT / "build" / "setup.log"
COUNTER = re.compile(r"\[(\d+)/(\d+)\]")


def run_step(title: str, command: list[str]) -> None:
    """Run one command, showing the compiler's [n/m] lines on one moving line; exits with its log's end on failure."""
    started = time.monotonic()
    is_terminal = sys.stdout.isatty()
    print(f"  {title} ...", end="" if is_terminal else "\n", flush=True)
    shown = 0.0
    with LOG.open("a", encoding="utf-8") as log:
        log.write(f"\n$ {' '.join(command)}\n")
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
        assert process.stdout is not None
        for line in process.stdout:
            log.write(line)
            match = COUNTER.search(line)
            if match and time.monotonic() - shown > (0.2 if is_terminal else 15):
                shown = time.monotonic()
                text = f"  {title} ... compiling {match[1]} of {match[2]}"
                print(f"\r{text:<78}" if is_terminal else text, end="" if is_terminal else "\n", flush=True)
    if process.wait() != 0:
        tail = "".join(LOG.read_text(encoding="utf-8").splitlines(keepends=True)[-25:])
        sys.exit(f"\n{title} failed; the whole log is {LOG}\n{tail}")
    text = f"  {title}: {time.monotonic() - started:.0f} s"
    print(f"\r{text:<78}" if is_terminal else text, flush=True)


def main() -> None:
    """Usage: setup.py VENV."""
    venv = Path(sys.argv[1])
    if sys.version_info < (3, 11):  # noqa: UP036 - whatever Python the Makefile found
        sys.exit(f"Python 3.11 or newer is needed, this is {sys.version.split()[0]}: make PYTHON=python3.12 ...")
    LOG.parent.mkdir(exist_ok=True)
    print("Setting up FreeToken for GGUF (once; llama-cpp-python is compiled, which takes 5 to 10 minutes)", flush=True)
    python = str(venv / "bin" / "python")
    if not Path(python).exists():
        run_step("virtual environment", [sys.executable, "-m", "venv", str(venv)])
    pip = [python, "-m", "pip", "install", "-v", "--disable-pip-version-check", "-c", str(ROOT / "constraints.txt")]
    run_step("PyTorch", [*pip, "torch"])
    run_step("llama-cpp-python", [*pip, "llama-cpp-python"])
    run_step("FreeToken and its native library", [*pip, "-e", f"{ROOT}[test]"])


if __name__ == "__main__":
    main()
