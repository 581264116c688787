"""The profile: what fills and experts on the CPU were measured to take on this machine, and what was chosen by it. No
torch.

One JSON file for each GPU in the user's cache folder, with an entry for each set of conditions. `ft bench bw` and the
engine read and write the same file. An entry counts only where all conditions are those of now; `look_up` says which
differ otherwise, and whoever asked measures anew.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from freetoken import quants
from freetoken.experts.bank import LayerBanks
from freetoken.experts.split import Q16, fraction_q16
from freetoken.quants import GgmlType

__all__ = ["FOLDER_VARIABLE", "Conditions", "Entry", "ExpertFormat", "Found", "Times", "folder", "look_up", "store"]

log = logging.getLogger(__name__)

FOLDER_VARIABLE = "FREETOKEN_PROFILE_DIR"
"""Environment variable that names the folder of profiles."""
VERSION = 1
_NO_GPU = "cpu"
_MAX_FILE_BYTES = 16 << 20
_MAX_ENTRIES = 32
"""Entries kept in a file, the latest ones."""


@dataclass(frozen=True)
class ExpertFormat:
    """The matrices of an expert: types of gate, up and down, gate [n_ff, n_embd]."""

    types: tuple[int, int, int]
    n_embd: int
    n_ff: int

    @classmethod
    def of(cls, layer: LayerBanks) -> ExpertFormat:
        gate, up, down = layer.banks
        return cls((gate.type, up.type, down.type), gate.cols, gate.rows)

    @classmethod
    def parse(cls, text: str) -> ExpertFormat:
        """The format of a name. Raises ValueError."""
        match = re.fullmatch(r"(\S+) (\d{1,6})x(\d{1,6})", text)
        names = match[1].split("/") if match else []
        if match is None or len(names) not in (1, 3) or any(name not in GgmlType.__members__ for name in names):
            raise ValueError(f"{text!r} is no format of experts, such as Q4_K/Q4_K/Q6_K 2048x768")
        gate, up, down = (int(GgmlType[name]) for name in (names if len(names) == 3 else names * 3))
        return cls((gate, up, down), int(match[2]), int(match[3]))

    @property
    def type_name(self) -> str:
        """One name, or those of gate, up and down where they differ."""
        names = [quants.type_name(t) for t in self.types]
        return names[0] if len(set(names)) == 1 else "/".join(names)

    @property
    def expert_bytes(self) -> int:
        gate, up, down = self.types
        wide = quants.row_bytes(gate, self.n_embd) + quants.row_bytes(up, self.n_embd)
        return self.n_ff * wide + self.n_embd * quants.row_bytes(down, self.n_ff)

    def __str__(self) -> str:
        return f"{self.type_name} {self.n_embd}x{self.n_ff}"


@dataclass(frozen=True)
class Times:
    """Seconds by number of experts: fills of a layer's misses, and experts on the CPU, each alone and beside the other.
    Without a GPU there are no fills."""

    fill: dict[int, float] = field(default_factory=dict)
    fill_beside: dict[int, float] = field(default_factory=dict)
    cpu: dict[int, float] = field(default_factory=dict)
    cpu_beside: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Conditions:
    """What measurements depend on. A `gpu` of "" is none."""

    gpu: str
    """Its UUID."""
    driver: str
    link: str
    """Generation and width of the card's PCIe link under load, such as "5 x16"; "" where the system does not tell."""
    cpu: str
    cores: int
    """That this process may use: less where a container's share is."""
    threads: int
    memory_gib: int
    kernels: str
    """The CPU kernels in use, their planes, and a hash of them and of the fills' kernel."""

    def differences(self, now: Conditions) -> list[str]:
        """Which fields differ, with what they were and are."""
        names = [f.name for f in fields(self) if getattr(self, f.name) != getattr(now, f.name)]
        return [f"{name} was {getattr(self, name)!s}, is {getattr(now, name)!s}" for name in names]


@dataclass(frozen=True)
class Entry:
    """What was measured under some conditions. `choices` are records of `gpu.calibrate` by what they are for."""

    conditions: Conditions
    measured: str
    """Date and time, ISO 8601."""
    copy_gbs: float = 0.0
    """B_P of the copy engine, from locked memory."""
    read_gbs: float = 0.0
    """B_H of threads that only read."""
    formats: dict[ExpertFormat, Times] = field(default_factory=dict)
    choices: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def new(cls, conditions: Conditions, **values: Any) -> Entry:
        return cls(conditions, datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"), **values)

    def joined(self, later: Entry) -> Entry:
        """With a later measurement under the same conditions; what that lacks stays."""
        return replace(
            later,
            copy_gbs=later.copy_gbs or self.copy_gbs,
            read_gbs=later.read_gbs or self.read_gbs,
            formats=self.formats | later.formats,
            choices=self.choices | later.choices,
        )

    def fraction(self, kind: ExpertFormat) -> int:
        """Q16 share of the misses to fill, for a format that was not measured: by the rates of the same types in
        another size, each beside the other, else by those of the copy engine and of plain reading;
        all where nothing is known."""
        for other, times in self.formats.items():
            if other.types == kind.types and times.fill and times.cpu:
                b_p, b_h = (_gbs(other, by) for by in (times.fill_beside or times.fill, times.cpu_beside or times.cpu))
                return fraction_q16(b_p, b_p + b_h)
        return fraction_q16(self.copy_gbs, self.read_gbs) if self.copy_gbs and self.read_gbs else Q16


def _gbs(kind: ExpertFormat, seconds: Mapping[int, float]) -> float:
    n = max(seconds)
    return n * kind.expert_bytes / seconds[n] / 1e9


@dataclass(frozen=True)
class Found:
    """What a file holds for some conditions; `reason` says why there is no entry, `is_link_only` whether only the link
    differs, which a card that idles runs slower."""

    entry: Entry | None
    reason: str = ""
    is_link_only: bool = False


def folder(environ: Mapping[str, str] | None = None) -> Path:
    """Where profiles are kept: what the variable names, else below the user's cache folder."""
    environ = os.environ if environ is None else environ
    if environ.get(FOLDER_VARIABLE):
        return Path(environ[FOLDER_VARIABLE])
    base = environ.get("XDG_CACHE_HOME") or ""
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "freetoken"


def path_of(gpu: str, where: Path) -> Path:
    """The file of a GPU; of the CPU alone for ""."""
    return where / f"profile-{re.sub(r'[^A-Za-z0-9-]', '_', gpu) or _NO_GPU}.json"


def look_up(now: Conditions, where: Path | None = None) -> Found:
    """The entry measured under just these conditions."""
    where = folder() if where is None else where
    path = path_of(now.gpu, where)
    entries, problem = _read(path)
    if problem:
        return Found(None, problem)
    for entry in entries:
        if entry.conditions == now:
            return Found(entry)
    if entries:
        nearest = min(reversed(entries), key=lambda entry: len(entry.conditions.differences(now)))
        what = "; ".join(nearest.conditions.differences(now))
        is_link_only = replace(nearest.conditions, link=now.link) == now
        return Found(None, f"the profile of {nearest.measured[:10]} does not hold any more: {what}", is_link_only)
    others = sorted(p.stem.removeprefix("profile-") for p in where.glob("profile-GPU-*.json") if p != path)
    if others:
        return Found(None, f"the profiles in {where} are of other GPUs ({', '.join(others)})")
    return Found(None, f"there is no profile in {where}")


def store(entry: Entry, where: Path | None = None) -> Path | None:
    """Put an entry into its GPU's file, joined with what stands there for the same conditions. The file is replaced in
    one step. None, with a warning, where it cannot be written."""
    path = path_of(entry.conditions.gpu, folder() if where is None else where)
    entries, _ = _read(path)
    same = [e for e in entries if e.conditions == entry.conditions]
    kept = [e for e in entries if e.conditions != entry.conditions][-(_MAX_ENTRIES - 1) :]
    kept.append(same[0].joined(entry) if same else entry)
    text = json.dumps({"version": VERSION, "entries": [_to_json(e) for e in kept]}, indent=1)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=".profile-", delete=False) as file:
            file.write(text)
        os.replace(file.name, path)
    except OSError as error:
        log.warning("the profile cannot be stored in %s: %s", path, error.strerror or error)
        return None
    return path


# --- JSON ------------------------------------------------------------------------------------------------------------


def _read(path: Path) -> tuple[list[Entry], str]:
    """The entries of a file, and what is wrong with it; a damaged entry makes the whole file count as none."""
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            return [], f"{path} is no profile: {path.stat().st_size} bytes"
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return [], ""
    except (OSError, ValueError, RecursionError) as error:
        return [], f"{path} cannot be read: {error}"
    if not isinstance(data, dict) or data.get("version") != VERSION:
        return [], f"{path} is of another version of the program"
    try:
        return [_from_json(entry) for entry in data["entries"]], ""
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        return [], f"{path} is damaged: {error!r}"


def _to_json(entry: Entry) -> dict[str, Any]:
    formats = {
        str(kind): {name: {str(n): round(t * 1e6, 3) for n, t in by.items()} for name, by in asdict(times).items()}
        for kind, times in entry.formats.items()
    }
    return {
        "conditions": asdict(entry.conditions),
        "measured": entry.measured,
        "copy_gbs": entry.copy_gbs,
        "read_gbs": entry.read_gbs,
        "microseconds": formats,
        "choices": entry.choices,
    }


def _from_json(data: Mapping[str, Any]) -> Entry:
    stored = data["conditions"]
    values = {f.name: stored[f.name] for f in fields(Conditions)}
    for f in fields(Conditions):
        if not isinstance(values[f.name], int if f.type == "int" else str):
            raise ValueError(f"{f.name} is {values[f.name]!r}")
    formats = {
        ExpertFormat.parse(name): Times(**{f.name: _seconds(by.get(f.name, {})) for f in fields(Times)})
        for name, by in data["microseconds"].items()
    }
    choices = {str(name): dict(choice) for name, choice in data.get("choices", {}).items()}
    b_p, b_h = (_positive(data[name], least=0.0) for name in ("copy_gbs", "read_gbs"))
    return Entry(Conditions(**values), str(data["measured"]), b_p, b_h, formats, choices)


def _seconds(by: Mapping[str, Any]) -> dict[int, float]:
    found = {int(n): _positive(t) * 1e-6 for n, t in by.items()}
    if found and min(found) < 1:
        raise ValueError(f"times of {min(found)} experts")
    return found


def _positive(value: Any, least: float = 1e-3) -> float:
    number = float(value)
    if not math.isfinite(number) or number < least:
        raise ValueError(f"{value!r} is no measured value")
    return number
