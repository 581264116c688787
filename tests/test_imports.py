"""Imports run one way: a module may import only from rows above its own (docs/design: the house)."""

from __future__ import annotations

import ast
import os
import pathlib
import subprocess
import sys

import pytest

PACKAGE = pathlib.Path(__file__).resolve().parent.parent / "freetoken"
ROWS = [
    ["__init__", "errors"],
    ["options", "cores", "numa", "beside"],
    ["quants", "gguf"],
    ["spec", "tokenizer", "chat", "stops"],
    ["rebuild", "request", "batch", "turns"],
    ["reference", "reference_grids", "native"],
    ["kernels"],
    ["kvcache", "experts"],
    ["prompt_memory"],
    ["plan"],
    ["forecast"],
    ["sampler"],
    ["slot"],
    ["blocks", "arch", "cpu", "gpu", "runner"],
    ["engine"],
    ["server"],
    ["cli", "__main__"],
]
ROW_OF = {name: i for i, names in enumerate(ROWS) for name in names}
LATE_IMPORTS = (("runner", "cpu"),)
"""torch, by the first long prompt; commands import the engine once the port is open."""


def module_files() -> list[pathlib.Path]:
    return sorted(PACKAGE.rglob("*.py"))


def part_of(path: pathlib.Path) -> str:
    """The row name of a file: its first path component."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_parts(node: ast.AST) -> list[str]:
    """Names right under `freetoken` that an import statement takes."""
    if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "freetoken":
        parts = node.module.split(".")
        return [parts[1]] if len(parts) > 1 else [alias.name for alias in node.names]
    if isinstance(node, ast.Import):
        return [a.name.split(".")[1] for a in node.names if a.name.startswith("freetoken.")]
    return []


@pytest.mark.parametrize("path", module_files(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_module_imports_only_from_rows_above(path: pathlib.Path) -> None:
    own = part_of(path)
    assert own in ROW_OF, f"{path}: a new part needs a row"
    for node in ast.walk(ast.parse(path.read_text())):
        for name in imported_parts(node):
            if name.startswith("__version"):
                continue
            assert ROW_OF[name] <= ROW_OF[own], f"{path}: {own} imports {name}, which lies below it"


@pytest.mark.parametrize("path", module_files(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_own_imports_stand_at_the_top(path: pathlib.Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            hidden = [n for inner in ast.walk(node) for n in imported_parts(inner)]
            late = [n for n in hidden if (part_of(path), n) not in LATE_IMPORTS and part_of(path) != "cli"]
            assert not late, f"{path}: {node.name} hides imports of {late}"


def test_server_and_tokenizer_never_import_torch() -> None:
    code = (
        "import sys, freetoken.server, freetoken.tokenizer, freetoken.chat, freetoken.cli.main;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_openmp_threads_sleep_whichever_library_comes_first() -> None:
    """GNU's OpenMP tells how long an idle thread spins, once for each time that it is loaded."""
    environ = {k: v for k, v in os.environ.items() if k != "OMP_WAIT_POLICY"} | {"OMP_DISPLAY_ENV": "verbose"}
    for first in ("import freetoken.tokenizer", "from freetoken import quants; quants.to_float_pointer(16)", "pass"):
        code = f"{first}; from freetoken.runner import import_prefill; import_prefill(); import os; print(os.environ)"
        done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
        spins = [line.split("=")[1].strip() for line in done.stderr.splitlines() if "GOMP_SPINCOUNT" in line]
        assert spins and set(spins) == {"'0'"}, (first, spins)
        assert "OMP_WAIT_POLICY" not in done.stdout
