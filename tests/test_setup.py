"""What the set-up shows of pip's and the compiler's output, and what it takes for a whole environment."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tools import setup


@pytest.mark.parametrize(
    ("line", "stage"),
    [
        ("  [12/90] Building CXX object a.o", "compiling 12 of 90"),
        ("[  7%] Building C object b.o", "compiling 7 %"),
        (
            "  Downloading torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl (527.1 MB)",
            "downloading torch 2.13.0 (527.1 MB)",
        ),
        (
            "  Downloading nvidia_nccl_cu13-2.29.7-py3-none-any.whl.metadata (2.0 kB)",
            "downloading nvidia_nccl_cu13 2.29.7 (2.0 kB)",
        ),
        ("  Downloading https://host/a/jinja2-3.1.6-py3-none-any.whl (134 kB)", "downloading jinja2 3.1.6 (134 kB)"),
        ("  Building wheel for llama-cpp-python (pyproject.toml): started", "building llama-cpp-python"),
        ("Installing collected packages: mpmath, torch", "unpacking"),
        ("  Looking for [1/2] of something", None),
        ("Collecting torch", None),
    ],
)
def test_stages(line: str, stage: str | None) -> None:
    assert setup.stage_of(line) == stage


def test_an_environment_without_pip_is_not_whole(tmp_path: Path) -> None:
    assert setup.has_pip(Path(sys.executable))
    assert not setup.has_pip(tmp_path / "python")
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    assert not setup.has_pip(broken)


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(SystemExit, match="build-essential"):
        setup.check_machine()


def test_a_step_that_fails_shows_its_last_lines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(setup, "LOG", tmp_path / "setup.log")
    setup.run_step("good", [sys.executable, "-c", "print('fine')"])
    with pytest.raises(SystemExit, match=r"(?s)out of luck.*bad failed"):
        setup.run_step("bad", [sys.executable, "-c", "print('out of luck'); raise SystemExit(3)"])
    assert "fine" in (tmp_path / "setup.log").read_text()
