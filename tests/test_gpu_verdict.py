"""What is missing for the GPU engine is one sentence, an error only where the GPU was asked for."""

from __future__ import annotations

import dataclasses
import logging
import pathlib
import subprocess
import sys
from collections.abc import Callable

import pytest

from freetoken.errors import EngineError, OptionError
from freetoken.gpu import driver, verdict
from freetoken.gpu.driver import Device
from freetoken.gpu.verdict import choose_device, survey
from freetoken.options import EngineOptions

CARD = Device(0, "Card", "GPU-0", (8, 9), 66, 16 << 30, 12080, True, True, True)
ASKED = EngineOptions(n_gpu_layers=99)
Patch = pytest.MonkeyPatch


def have(patch: Patch, card: Device | None = CARD, cuda: str | None = "12.8") -> None:
    """A machine on which everything is there."""
    patch.setattr(driver, "find_devices", lambda: [] if card is None else [card])
    patch.setattr(driver, "why_no_device", lambda: "" if card else "no driver")
    patch.setattr(verdict, "_torch_cuda", lambda: cuda)
    for check in ("_triton_problem", "_compiler_problem", "_cache_problem"):
        patch.setattr(verdict, check, lambda: "")


def old_card(patch: Patch) -> None:
    have(patch, dataclasses.replace(CARD, capability=(7, 0)))


def no_torch_cuda(patch: Patch) -> None:
    have(patch, cuda=None)


def old_driver(patch: Patch) -> None:
    have(patch, cuda="13.0")


def no_mapping(patch: Patch) -> None:
    have(patch, dataclasses.replace(CARD, can_map_host=False))


def no_compiler(patch: Patch) -> None:
    check = verdict._compiler_problem
    have(patch)
    patch.setattr(verdict, "_compiler_problem", check)
    patch.delenv("CC", raising=False)
    patch.setenv("PATH", "/nowhere")


def wrong_compiler(patch: Patch) -> None:
    no_compiler(patch)
    patch.setenv("CC", "mycc -O2")


def no_headers(patch: Patch) -> None:
    check = verdict._compiler_problem
    have(patch)
    patch.setattr(verdict, "_compiler_problem", check)
    patch.setattr(verdict, "_compiler", lambda: "/usr/bin/gcc")
    patch.setattr(verdict.sysconfig, "get_paths", lambda scheme: {"include": "/nowhere"})


def no_triton(patch: Patch) -> None:
    check = verdict._triton_problem
    have(patch)
    patch.setattr(verdict, "_triton_problem", check)
    patch.setattr(verdict.importlib.util, "find_spec", lambda name: None)


def no_cache(patch: Patch) -> None:
    check = verdict._cache_problem
    have(patch)
    patch.setattr(verdict, "_cache_problem", check)
    patch.setenv("TRITON_CACHE_DIR", "/dev/null/cache")


PROBLEMS: list[tuple[Callable[[Patch], None], str]] = [
    (old_card, "capability 7.0, at least 7.5 is needed"),
    (no_mapping, "cannot read host memory"),
    (no_torch_cuda, "torch is built without CUDA: install"),
    (old_driver, "knows CUDA 12.8, torch is built for 13.0: update"),
    (no_triton, "pip install triton"),
    (no_compiler, "no C compiler is there"),
    (wrong_compiler, "CC=mycc -O2 is not there"),
    (no_headers, "python3-dev"),
    (no_cache, "TRITON_CACHE_DIR"),
]


@pytest.mark.parametrize(("setting", "says"), PROBLEMS, ids=[setting.__name__ for setting, _ in PROBLEMS])
def test_problems(
    setting: Callable[[Patch], None], says: str, monkeypatch: Patch, caplog: pytest.LogCaptureFixture
) -> None:
    setting(monkeypatch)
    found = survey()
    assert says in found.problem and not found.is_usable and "\n" not in found.problem
    assert choose_device(EngineOptions()) is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "Card is not used, all layers run on the CPU: " in caplog.text and says in caplog.text
    with pytest.raises(EngineError, match="Card cannot be used"):
        choose_device(ASKED)
    assert choose_device(EngineOptions(n_gpu_layers=0)) is None and choose_device(EngineOptions(gpu=None)) is None
    assert len(caplog.records) == 1


def test_all_is_there(monkeypatch: Patch, caplog: pytest.LogCaptureFixture) -> None:
    have(monkeypatch)
    assert survey().is_usable and choose_device(EngineOptions()) == CARD == choose_device(ASKED)
    assert choose_device(EngineOptions(), 15 << 30) == CARD
    assert "takes 17408 MiB, the card has 16384" in survey(0, 17 << 30).problem
    assert not caplog.records
    have(monkeypatch, cuda="12.4")
    assert survey().is_usable
    have(monkeypatch, dataclasses.replace(CARD, driver_version=13000))
    assert survey().is_usable


def test_no_card_is_no_error_unless_it_was_named(monkeypatch: Patch, caplog: pytest.LogCaptureFixture) -> None:
    have(monkeypatch, None)
    with caplog.at_level(logging.INFO):
        assert choose_device(EngineOptions()) is None
        assert choose_device(ASKED) is None
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"]
    assert "-ngl has no effect: all layers run on the CPU (no driver)" in caplog.text
    with pytest.raises(OptionError, match="-dev CUDA0: no driver"):
        choose_device(EngineOptions(is_gpu_named=True))
    have(monkeypatch)
    with pytest.raises(OptionError, match="there is no CUDA3, only CUDA0"):
        choose_device(EngineOptions(gpu=3, is_gpu_named=True))
    assert choose_device(EngineOptions(gpu=3, n_gpu_layers=5)) is None


def test_a_lone_cc_is_named_for_triton(monkeypatch: Patch, tmp_path: pathlib.Path) -> None:
    have(monkeypatch)
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", "unset below, restored after")
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", str(tmp_path))
    choose_device(EngineOptions())
    assert verdict.os.environ["CC"] == str(compiler)


def test_the_cache_folder(monkeypatch: Patch, tmp_path: pathlib.Path) -> None:
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.setenv("TRITON_HOME", str(tmp_path))
    assert verdict.cache_folder() == tmp_path / ".triton" / "cache" and verdict._cache_problem() == ""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file"))
    assert "file" in verdict._cache_problem()


def test_this_machine_is_judged_without_torch() -> None:
    code = (
        "import sys; from freetoken.gpu import verdict; v = verdict.survey(); verdict._torch_cuda();"
        "print(v.problem or v.device); sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.count("\n") == 1 and len(done.stdout) > 5


def test_torchs_own_version_file_is_read() -> None:
    import torch

    assert verdict._torch_cuda() == torch.version.cuda
