"""Write docs/plans.md: plans of known models for cards of 8 to 32 GB and 32 to 128 GB of main memory.

`python -m tools.plan_table` writes it, `--check` only says whether it is what the code would write. Nothing is measured
here: speeds are `forecast.speed`'s predictions.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from freetoken.cli.plan import plan_of_geometry
from freetoken.cli.table import markdown
from freetoken.errors import OptionError
from freetoken.forecast.geometries import GEOMETRIES
from freetoken.forecast.speed import CARD_CLASSES, CPU_GBS, DISK_GBS, HYBRID_SHARE
from freetoken.forecast.whole import Machine
from freetoken.options import EngineOptions

GIB = 1 << 30
CARDS, MEMORIES = (8, 12, 16, 24, 32), (32, 64, 96, 128)
FREE_SHARE = 0.96
"""Of a card's memory that is free on a machine whose screen another chip draws: assumed."""
N_CORES = 8
N_CTX = 16384
PATH = Path(__file__).resolve().parent.parent / "docs" / "plans.md"
HEAD = ("card, GB", "context", "experts in slots", "hits", *(f"{m} GB RAM, tok/s" for m in MEMORIES))


def rows_of(name: str) -> list[list[str]]:
    """One row a card."""
    rows = []
    options = EngineOptions(n_ctx=N_CTX)
    for card in CARDS:
        row: list[str] = []
        for memory in MEMORIES:
            machine = Machine(int(card * GIB * FREE_SHARE), "", memory * GIB, "", N_CORES)
            try:
                plan = plan_of_geometry(name, options, machine)
            except OptionError:
                row = [str(card), "-", "does not fit", "-", *("-" for _ in MEMORIES)]
                break
            gpu, p = plan.gpu, plan.prediction
            assert gpu is not None
            if not row:
                context = str(gpu.n_ctx) if any(plan.sizes.spec.n_kv) else "not counted"
                share = "all" if not gpu.is_offloading else f"{100 * gpu.resident_share:.0f}%"
                share += f", {gpu.first_layer} layers on the CPU" if gpu.first_layer else ""
                row = [str(card), context, share, f"{100 * p.hit_rate:.0f}%" if gpu.is_offloading else ""]
            row.append(f"{p.tokens_per_s:.0f}{' (disk)' if plan.host.cold_bytes else ''}")
        rows.append(row)
    return rows


def text() -> str:
    """The whole page."""
    classes = ", ".join(
        f"{card} GB {pcie:g} and {gpu:g}" for card, (_, pcie, gpu) in zip(CARDS, CARD_CLASSES, strict=False)
    )
    lines = [
        "# Plans of known models",
        "",
        "Made by `python -m tools.plan_table` from published configurations, without files or cards. **All speeds are",
        "predictions** of one stream at the start of its context (`freetoken/forecast/speed.py` has the model and its",
        f"constants), for a context of {N_CTX} tokens; `ft plan` answers for your own machine, file and flags. Not all",
        "of these architectures run here yet.",
        "",
        f"Assumed: {100 * FREE_SHARE:.0f}% of the card is free; experts on the CPU run at {CPU_GBS:g} GB/s, a drive at "
        f"{DISK_GBS:g}, hybrid at {100 * HYBRID_SHARE:.0f}% of PCIe and",
        "CPU together; fills (first figure) and the card's memory (second) by its class:",
        f'{classes}. "(disk)": the experts exceed main',
        "memory, so some are read from the file again and again. Hits follow a curve through one measured point of",
        "synthetic routing; for real text more have been reported (`speed.py` says which).",
    ]
    for geometry in GEOMETRIES:
        machine = Machine(0, "", GIB, "", N_CORES)
        sizes = plan_of_geometry(geometry.name, EngineOptions(), machine).sizes
        size = f"{sizes.n_bytes / GIB:.1f} GiB, {sizes.pool_bytes / GIB:.1f} of them routed experts"
        lines += ["", f"## {sizes.name}", "", f"{size}.", "", *markdown(HEAD, rows_of(geometry.name))]
        if geometry.unknown:
            lines += ["", *(f"* Not known: {what}." for what in geometry.unknown)]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Write or check."""
    parser = argparse.ArgumentParser(description="Write docs/plans.md.")
    parser.add_argument("--check", action="store_true", help="write nothing; 1 where the page is out of date")
    args = parser.parse_args()
    if args.check:
        return int(PATH.read_text(encoding="utf-8") != text())
    PATH.write_text(text(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
