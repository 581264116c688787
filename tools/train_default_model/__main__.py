"""The recipe of the default model, stage by stage; each reads and writes files of one work folder and ends in time.

    python -m tools.train_default_model STAGE [STAGE ...] --work FOLDER --teacher SmolLM2-135M-Instruct.Q4_1.gguf

generate   the teacher answers prompts (a GPU)                     raw-*.npz
clean      filter; add written dialogues                           clean-*.npz
pack-text  compressed shards for the way home                      OUT/text-*.tar
vocab      our byte-level BPE                                      vocab.json
encode     our tokens, aligned with the teacher's                  enc-*.npz
annotate   the teacher's likeliest next tokens (a GPU)             hints-*.npy
train      the mixture of experts (a GPU)                          student.npz, student-held-out.json
dense      the dense twin, as many steps                           dense.npz, dense-held-out.json
ship       weights in parts, figures                               OUT/student.part-*, OUT/facts.tar.gz
unpack     what came back (from --out) into the work folder
export     student-F32.gguf, student-BF16.gguf, student.gguf (the shipped types)
evaluate   the figures of the model card                           OUT/card.json, OUT/expert-load.svg
card       OUT/README.md from card.json

Without a GPU everything runs too, at toy sizes (--toy).
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Callable
from pathlib import Path

from tools.train_default_model.work import load_json, say

MIB = 1 << 20


def _teacher(args: argparse.Namespace):  # type: ignore[no-untyped-def]  # torch is imported late
    import torch

    from tools.train_default_model.teacher import Teacher

    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    return Teacher(args.teacher, args.device, dtype)


def run_generate(args: argparse.Namespace) -> None:
    from tools.train_default_model.generate import GenerateOptions, generate

    options = GenerateOptions(batch=args.batch, is_compiled=not args.no_compile, has_kernel=not args.plain_attention)
    if args.toy:
        options = dataclasses.replace(options, batch=4, n_ctx=288, max_new=24, max_docs=args.toy_docs)
    generate(_teacher(args), options, args.work, args.minutes * 60)


def run_clean(args: argparse.Namespace) -> None:
    from tools.train_default_model.clean import clean

    share = 12.0 if args.toy else args.authored
    clean(args.work, args.teacher, n_processes=args.jobs, authored_share=share, budget_s=args.minutes * 60)


def run_pack_text(args: argparse.Namespace) -> None:
    from tools.train_default_model.ship import pack_text

    pack_text(args.work, args.out, n_files=args.files, n_processes=args.jobs)


def run_vocab(args: argparse.Namespace) -> None:
    from tools.train_default_model.vocab import train_vocabulary

    n_vocab = 512 if args.toy else 8192
    train_vocabulary(args.work, args.teacher, n_vocab=n_vocab, n_bytes=64 * MIB)


def run_encode(args: argparse.Namespace) -> None:
    from tools.train_default_model.encode import encode

    encode(args.work, args.teacher, n_processes=args.jobs, budget_s=args.minutes * 60)


def run_annotate(args: argparse.Namespace) -> None:
    from tools.train_default_model.annotate import annotate

    size = 1 << 11 if args.toy else 1 << 17
    annotate(args.work, _teacher(args), budget_s=args.minutes * 60, temperature=0.65, batch_tokens=size)


def _train(args: argparse.Namespace, name: str) -> None:
    import torch

    from tools.train_default_model.model import Geometry
    from tools.train_default_model.train import TrainOptions, train
    from tools.train_default_model.vocab import load_tokenizer

    geometry = Geometry(n_vocab=load_tokenizer(args.work).get_vocab_size())
    options = TrainOptions(is_compiled=not args.no_compile, is_grouped=not args.all_experts)
    if args.toy:
        geometry = dataclasses.replace(geometry, n_embd=256, n_layer=1, n_head=4, n_kv=2, n_expert=4, n_used=2)
        options = dataclasses.replace(options, rows=2, n=128, n_steps=args.toy_steps)
    if name == "dense":
        geometry = dataclasses.replace(geometry, n_expert=0)
        options = dataclasses.replace(options, n_steps=load_json(args.work / "student.json")["steps"])
    train(args.work, name, geometry, options, torch.device(args.device), args.minutes * 60)


def run_train(args: argparse.Namespace) -> None:
    _train(args, "student")


def run_dense(args: argparse.Namespace) -> None:
    _train(args, "dense")


def run_ship(args: argparse.Namespace) -> None:
    from tools.train_default_model.ship import ship

    ship(args.work, args.out, "student")


def run_unpack(args: argparse.Namespace) -> None:
    from tools.train_default_model.ship import unpack

    unpack(args.out, args.work)


def run_export(args: argparse.Namespace) -> None:
    from tools.train_default_model.export import export

    for kind, name in (("F32", "student-F32"), ("BF16", "student-BF16"), ("shipped", "student")):
        export(args.work, "student", args.work / f"{name}.gguf", kind)


def run_evaluate(args: argparse.Namespace) -> None:
    from tools.train_default_model.evaluate import evaluate

    files = {"shipped": args.work / "student.gguf", "F32": args.work / "student-F32.gguf"}
    n_answers, n_tokens = (3, 12) if args.toy else (100, 320)
    evaluate(args.work, files, args.teacher, args.out, n_answers=n_answers, n_tokens=n_tokens)


def run_card(args: argparse.Namespace) -> None:
    from tools.train_default_model.card import write_card

    write_card(args.out / "card.json", args.out / "README.md")


STAGES: dict[str, Callable[[argparse.Namespace], None]] = {
    "generate": run_generate,
    "clean": run_clean,
    "pack-text": run_pack_text,
    "vocab": run_vocab,
    "encode": run_encode,
    "annotate": run_annotate,
    "train": run_train,
    "dense": run_dense,
    "ship": run_ship,
    "unpack": run_unpack,
    "export": run_export,
    "evaluate": run_evaluate,
    "card": run_card,
}


def main() -> int:
    """Run the named stages in their order on the line."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.train_default_model",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("stages", nargs="+", metavar="STAGE[=MINUTES]")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--teacher", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--batch", type=int, default=2048, help="sequences generated at once")
    parser.add_argument("--authored", type=float, default=0.3, help="written dialogues per generated one")
    parser.add_argument("--files", type=int, default=4, help="files of pack-text")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--no-compile", action="store_true", help="without torch.compile")
    parser.add_argument("--plain-attention", action="store_true", help="generate without the Triton kernel")
    parser.add_argument("--all-experts", action="store_true", help="compute every expert (plain products)")
    parser.add_argument("--toy", action="store_true", help="seconds on a CPU")
    parser.add_argument("--toy-docs", type=int, default=8)
    parser.add_argument("--toy-steps", type=int, default=20)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    args.out.mkdir(parents=True, exist_ok=True)
    wanted = [stage.partition("=") for stage in args.stages]
    for name, _, _ in wanted:
        if name not in STAGES:
            parser.error(f"unknown stage {name!r}; known: {', '.join(STAGES)}")
    for name, _, minutes in wanted:
        args.minutes = float(minutes or 10)
        say(name, "begins")
        STAGES[name](args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
