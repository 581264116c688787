"""Make a virtual environment and install the project into it, with progress. Called by the Makefile.

Standard library only: it runs before anything is installed. Every step's full output goes to `build/setup.log`; the
screen shows one line a step: what is downloaded, how far the compiler is, and the time. A set-up that was interrupted
goes on where it stopped.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOG = ROOT / "build" / "setup.log"
STAGES = (
    (re.compile(r"\s*\[(\d+)/(\d+)\]"), "compiling {} of {}"),  # ninja
    (re.compile(r"\s*\[ *(\d+)%\]"), "compiling {} %"),  # make
    (re.compile(r"\s*Downloading (?:\S*/)?(\S+?)-(\d[^-\s]*)-\S+ \(([^)]+)\)"), "downloading {} {} ({})"),
    (re.compile(r"\s*Building (?:wheel|editable) for (\S+)"), "building {}"),
    (re.compile(r"Installing collected packages"), "unpacking"),
)
TERMINAL_TICK_S, PLAIN_TICK_S = 1, 20


def stage_of(line: str) -> str | None:
    """What a line of pip's or the compiler's output says about the progress; None where it says nothing."""
    for pattern, text in STAGES:
        match = pattern.match(line)
        if match:
            return text.format(*match.groups())
    return None


class Progress:
    """The line of the running step: redrawn each second on a terminal, repeated now and then in a log."""

    def __init__(self, title: str) -> None:
        self.stage = ""
        self._title = title
        self._started = time.monotonic()
        self._is_terminal = sys.stdout.isatty()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Progress:
        self._draw(" ...")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def finish(self) -> None:
        """Replace the moving line by the step's time."""
        self.__exit__()
        self._draw(f": {self._seconds()}")
        if self._is_terminal:
            print(flush=True)

    def _run(self) -> None:
        while not self._stop.wait(TERMINAL_TICK_S if self._is_terminal else PLAIN_TICK_S):
            self._draw(f" ... {self._seconds()}  {self.stage}")

    def _seconds(self) -> str:
        minutes, seconds = divmod(round(time.monotonic() - self._started), 60)
        return f"{minutes} min {seconds:02} s" if minutes else f"{seconds} s"

    def _draw(self, text: str) -> None:
        line = f"  {self._title}{text}".rstrip()
        if self._is_terminal:
            width = shutil.get_terminal_size().columns - 1
            print(f"\r{line[:width]:<{width}}", end="", flush=True)
        else:
            print(line, flush=True)


def run_step(title: str, command: list[str]) -> None:
    """Run one command with its progress; exits with its log's end where it fails."""
    environment = dict(os.environ, PIP_DISABLE_PIP_VERSION_CHECK="1")
    environment.setdefault("CMAKE_BUILD_PARALLEL_LEVEL", str(len(os.sched_getaffinity(0))))
    with Progress(title) as progress, LOG.open("a", encoding="utf-8") as log:
        log.write(f"\n$ {' '.join(command)}\n")
        lines: deque[str] = deque(maxlen=25)
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", env=environment
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                log.write(line)
                lines.append(line)
                progress.stage = stage_of(line) or progress.stage
        if process.returncode == 0:
            progress.finish()
            return
    sys.exit(f"\n{''.join(lines)}\n{title} failed; its last lines are above, the whole log is {LOG}")


def check_machine() -> None:
    """Exits, saying what is missing, where this machine cannot build the project."""
    if sys.version_info < (3, 11):  # noqa: UP036 - whatever Python the Makefile found
        found = f"{sys.version.split()[0]} ({sys.executable})"
        sys.exit(f"Python 3.11 or newer is needed, this is {found}; name another one: make PYTHON=python3.12 ...")
    if importlib.util.find_spec("ensurepip") is None:
        sys.exit("Python's venv module is incomplete; install it (Debian and Ubuntu: apt install python3-venv)")
    compilers = [os.environ.get("CXX", "").partition(" ")[0], "c++", "g++", "clang++"]
    c_compilers = [os.environ.get("CC", "").partition(" ")[0], "cc", "gcc", "clang"]
    if not any(map(shutil.which, filter(None, compilers))) or not any(map(shutil.which, filter(None, c_compilers))):
        sys.exit(
            "A C and a C++ compiler are needed, and not both were found; install them (Debian and Ubuntu: apt install "
            "build-essential; Fedora: dnf install gcc-c++; Arch: pacman -S base-devel), or name yours in CC and CXX"
        )


def has_pip(python: Path) -> bool:
    """Whether the virtual environment is whole: an interrupted one may lack pip."""
    if not python.exists():
        return False
    return subprocess.run([str(python), "-m", "pip", "--version"], capture_output=True, check=False).returncode == 0


def main() -> None:
    """Usage: setup.py VENV."""
    venv = Path(sys.argv[1])
    check_machine()
    LOG.parent.mkdir(exist_ok=True)
    python = venv / "bin" / "python"
    if (venv / "installed").exists():
        print("Bringing the installation up to date", flush=True)
    else:
        print("Setting up FreeToken for GGUF (once; llama-cpp-python compiles for 5 to 10 minutes)", flush=True)
    if not has_pip(python):
        run_step("virtual environment", [sys.executable, "-m", "venv", str(venv)])
    pip = [str(python), "-m", "pip", "install", "-v", "-c", str(ROOT / "constraints.txt")]
    run_step("PyTorch", [*pip, "torch"])
    run_step("llama-cpp-python", [*pip, "llama-cpp-python"])
    run_step("FreeToken and its native library", [*pip, "-e", f"{ROOT}[test]"])


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("\nInterrupted; the next make goes on from here")
