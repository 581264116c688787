"""On a card: the kernel tests with the device in place of Triton's interpreter, the long runs of the slot cache too."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
DEFAULT = "not compile and not refused and not refuses"


@pytest.mark.gpu
@pytest.mark.timeout(1800)
def test_kernels_give_the_same_bits_on_the_device() -> None:
    environ = os.environ | {"FREETOKEN_TEST_DEVICE": "cuda"}
    files = [str(path) for path in sorted(TESTS.glob("test_kernels_*.py")) if "kernel_bits" in path.read_text()]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not gpu", "-k", DEFAULT, *files]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, cwd=TESTS.parent)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
