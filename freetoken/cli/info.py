"""`ft info`: what a model file holds, as a table or as JSON. Reads the header only; also for models we cannot run.

`ft info --devices`: which GPUs there are, and what keeps one from being used.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from freetoken.errors import ModelFileError, OptionError
from freetoken.gguf import Metadata, ModelFile, StringArray, Tensor, open_model
from freetoken.gpu import driver
from freetoken.gpu.verdict import survey
from freetoken.spec import check_tensors, read_spec

__all__ = ["Info", "add_arguments", "read_devices", "read_info", "run"]

GROUPS = ("embedding", "attention", "dense ffn", "router", "experts", "shared experts", "norms", "other", "output")
_EXPERT = re.compile(r"blk\.(\d+)\.ffn_(?:gate|up|down|gate_up)_exps\.weight")
_MIB = 1 << 20


@dataclass(frozen=True)
class FileInfo:
    """One file of the model."""

    path: str
    n_bytes: int
    n_tensors: int


@dataclass(frozen=True)
class GroupInfo:
    """Tensors of one group that share a type."""

    group: str
    type: str
    n_tensors: int
    n_params: int
    n_bytes: int


@dataclass(frozen=True)
class ExpertInfo:
    """Routed experts. Bytes of one expert are those of one layer, the smallest and the largest."""

    n_expert: int
    n_used: int | None
    n_layers: int
    bytes_min: int
    bytes_max: int
    n_bytes: int
    share: float


@dataclass(frozen=True)
class Info:
    """All facts; None where the metadata does not say, or not in the usual type. `problem` says why it cannot run."""

    files: list[FileInfo]
    n_bytes: int
    gguf_version: int
    ftw_version: int | None
    """None for a GGUF file."""
    architecture: str | None
    supported: bool
    problem: str | None
    name: str | None
    n_params: int
    n_params_active: int
    n_layer: int | None
    n_embd: int | None
    n_head: int | list[int] | None
    n_kv: int | list[int] | None
    n_ctx_train: int | None
    n_vocab: int | None
    tokenizer_model: str | None
    tokenizer_pre: str | None
    has_chat_template: bool
    chat_template_length: int
    experts: ExpertInfo | None
    groups: list[GroupInfo]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `ft info`."""
    parser.usage = "ft info FILE [--json] | ft info --devices [--json]"
    what = "a GGUF file, any file of a split model, or a folder with one model"
    parser.add_argument("file", metavar="FILE", nargs="?", help=what)
    parser.add_argument("-m", "--model", metavar="FNAME", help="the same, spelled as the other commands do")
    parser.add_argument("--devices", action="store_true", help="show the GPUs instead, and whether they can be used")
    parser.add_argument("--json", action="store_true", help="print the same facts as JSON")


def run(args: argparse.Namespace) -> int:
    """Print what the file holds. Raises ModelFileError where it is no sound GGUF file."""
    if args.devices:
        facts = read_devices()
        print(json.dumps(facts, indent=2) if args.json else "\n".join(_device_table(facts)))
        return 0
    path = args.file or args.model
    if path is None:
        raise OptionError("no model is named: ft info FILE")
    with open_model(path) as model:
        info = read_info(model)
    print(json.dumps(asdict(info), indent=2) if args.json else "\n".join(_table(info)))
    return 0


def read_devices() -> list[dict[str, object]]:
    """The facts of every card, and as `problem` what keeps it from being used, None for nothing."""
    return [asdict(d) | {"problem": survey(d.index).problem or None} for d in driver.find_devices()]


def _device_table(facts: list[dict[str, object]]) -> list[str]:
    if not facts:
        return [f"no GPU: {driver.why_no_device()}"]
    lines = []
    for device, values in zip(driver.find_devices(), facts, strict=True):
        lines += [
            f"CUDA{device.index:<11}{device.name}",
            f"{'identity':<15}{device.uuid}",
            f"{'capability':<15}{'.'.join(map(str, device.capability))}, {device.n_sm} SMs",
            f"{'memory':<15}{_size(device.total_bytes)}",
            f"{'driver':<15}CUDA {device.driver_cuda}",
            f"{'mapped files':<15}{'can' if device.can_register_read_only else 'cannot'} be locked in place",
            f"{'usable':<15}{'no: ' + str(values['problem']) if values['problem'] else 'yes'}",
        ]
    return lines


def read_info(model: ModelFile) -> Info:
    """The facts of an open model; only its header is read."""
    meta = model.metadata
    arch = _text(meta, "general.architecture")
    problem = _problem(model)
    template = _text(meta, "tokenizer.chat_template") or ""
    n_params = sum(t.n_values for t in model.tensors.values())
    experts = _experts(model, arch)
    idle = 0
    if experts is not None and experts.n_used is not None:
        routed = sum(t.n_values for t in model.tensors.values() if _EXPERT.fullmatch(t.name))
        idle = routed - routed * experts.n_used // experts.n_expert
    return Info(
        files=[FileInfo(str(s.path), s.n_bytes, len(s.tensors)) for s in model.shards],
        n_bytes=model.n_bytes,
        gguf_version=model.shards[0].version,
        ftw_version=None if model.shards[0].ftw is None else model.shards[0].ftw.version,
        architecture=arch,
        supported=problem is None,
        problem=problem,
        name=_text(meta, "general.name"),
        n_params=n_params,
        n_params_active=n_params - idle,
        n_layer=_count(meta, f"{arch}.block_count"),
        n_embd=_count(meta, f"{arch}.embedding_length"),
        n_head=_counts(meta, f"{arch}.attention.head_count"),
        n_kv=_counts(meta, f"{arch}.attention.head_count_kv"),
        n_ctx_train=_count(meta, f"{arch}.context_length"),
        n_vocab=_vocabulary(meta, arch),
        tokenizer_model=_text(meta, "tokenizer.ggml.model"),
        tokenizer_pre=_text(meta, "tokenizer.ggml.pre"),
        has_chat_template=bool(template),
        chat_template_length=len(template),
        experts=experts,
        groups=_groups(model.tensors.values()),
    )


def _problem(model: ModelFile) -> str | None:
    """Why we cannot run the model, None where we can."""
    try:
        check_tensors(read_spec(model), model)
    except ModelFileError as error:
        return str(error)
    return None


def _text(meta: Metadata, key: str) -> str | None:
    value = meta.get(key)
    return value if isinstance(value, str) else None


def _counts(meta: Metadata, key: str) -> int | list[int] | None:
    """A number, or a list of them where they differ between layers."""
    if key not in meta or not meta.type_of(key).removeprefix("array of ").startswith(("u", "i")):
        return None
    value = meta[key]
    if isinstance(value, int):
        return value
    numbers = [int(v) for v in meta.get_numbers(key)]
    return numbers[0] if len(set(numbers)) == 1 else numbers


def _count(meta: Metadata, key: str) -> int | None:
    value = _counts(meta, key)
    return value if isinstance(value, int) else None


def _vocabulary(meta: Metadata, arch: str | None) -> int | None:
    tokens = meta.get("tokenizer.ggml.tokens")
    return len(tokens) if isinstance(tokens, StringArray) else _count(meta, f"{arch}.vocab_size")


def _experts(model: ModelFile, arch: str | None) -> ExpertInfo | None:
    """Sizes of the routed experts, by the banks that the file holds."""
    layers: dict[int, int] = defaultdict(int)
    n_expert = 0
    for name, tensor in model.tensors.items():
        match = _EXPERT.fullmatch(name)
        if match is not None and len(tensor.shape) == 3:
            n_expert = n_expert or tensor.shape[2]
            layers[int(match[1])] += tensor.n_bytes // tensor.shape[2]
    if not layers:
        return None
    n_bytes = sum(t.n_bytes for t in model.tensors.values() if _EXPERT.fullmatch(t.name))
    total = sum(t.n_bytes for t in model.tensors.values())
    n_used = _count(model.metadata, f"{arch}.expert_used_count")
    used = n_used if n_used is not None and n_used <= n_expert else None
    sizes = layers.values()
    return ExpertInfo(n_expert, used, len(layers), min(sizes), max(sizes), n_bytes, round(n_bytes / total, 4))


def _group(name: str) -> str:
    """The group of a tensor, by its name."""
    if "norm" in name:
        return "norms"
    if name in ("output.weight", "output.bias"):
        return "output"
    for part, group in (
        ("token_embd", "embedding"),
        ("position_embd", "embedding"),
        ("_exps", "experts"),
        ("gate_inp", "router"),
        ("_shexp", "shared experts"),
        ("attn_", "attention"),
        ("ffn_", "dense ffn"),
    ):
        if part in name:
            return group
    return "other"


def _groups(tensors: Iterable[Tensor]) -> list[GroupInfo]:
    """Tensors by group and type: groups in the order of a forward pass, in each the type with the most bytes first."""
    found: dict[tuple[str, str], list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        found[_group(tensor.name), tensor.type_name].append(tensor)
    rows = [
        GroupInfo(group, kind, len(ts), sum(t.n_values for t in ts), sum(t.n_bytes for t in ts))
        for (group, kind), ts in found.items()
    ]
    return sorted(rows, key=lambda row: (GROUPS.index(row.group), -row.n_bytes))


def _table(info: Info) -> list[str]:
    """The facts in lines of text."""
    rows = [
        *(("file", f"{f.path} ({_size(f.n_bytes)}, {f.n_tensors} tensors)") for f in info.files),
        ("size", f"{_size(info.n_bytes)} in {len(info.files)} file(s), {_format(info)}"),
        ("architecture", info.architecture),
        ("supported", "yes" if info.supported else f"no: {info.problem}"),
        ("name", info.name),
        ("parameters", _parameters(info)),
        ("layers", info.n_layer),
        ("embedding", info.n_embd),
        ("heads", info.n_head),
        ("KV heads", info.n_kv),
        ("context", info.n_ctx_train),
        ("vocabulary", info.n_vocab),
        ("tokenizer", " / ".join(part for part in (info.tokenizer_model, info.tokenizer_pre) if part) or None),
        ("chat template", f"yes, {info.chat_template_length} characters" if info.has_chat_template else "no"),
        *_expert_rows(info.experts),
    ]
    lines = [f"{label:<15}{_printable('-' if value is None else str(value))}" for label, value in rows]
    lines += ["", f"{'group':<16}{'type':<10}{'tensors':>8}{'parameters':>15}{'MiB':>12}"]
    for g in info.groups:
        lines.append(f"{g.group:<16}{g.type:<10}{g.n_tensors:>8}{g.n_params:>15,}{g.n_bytes / _MIB:>12.2f}")
    return lines


def _format(info: Info) -> str:
    return f"GGUF {info.gguf_version}" if info.ftw_version is None else f"FTW {info.ftw_version}"


def _parameters(info: Info) -> str:
    active = f", {info.n_params_active:,} active for a token" if info.n_params_active != info.n_params else ""
    return f"{info.n_params:,}{active}"


def _expert_rows(experts: ExpertInfo | None) -> list[tuple[str, str]]:
    if experts is None:
        return [("experts", "none")]
    one = f"{experts.bytes_min / _MIB:.3f}"
    if experts.bytes_max != experts.bytes_min:
        one += f" to {experts.bytes_max / _MIB:.3f}"
    used = "an unknown number" if experts.n_used is None else experts.n_used
    return [
        ("experts", f"{experts.n_expert}, {used} used for a token, in {experts.n_layers} layers"),
        ("one expert", f"{one} MiB in a layer"),
        ("expert bytes", f"{_size(experts.n_bytes)}, {100 * experts.share:.1f}% of all weights"),
    ]


def _size(n_bytes: int) -> str:
    return f"{n_bytes / 2**30:.2f} GiB" if n_bytes >= 2**30 else f"{n_bytes / _MIB:.2f} MiB"


def _printable(value: str) -> str:
    """Text from a file, safe for a terminal and on one line."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in value)
