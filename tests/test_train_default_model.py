"""The recipe of the default model at toy size: each stage against a plain form, then the whole on a tiny teacher."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

pytest.importorskip("tokenizers", reason="the recipe needs the package tokenizers")

from freetoken.chat import load_template, prompt_tokens
from freetoken.tokenizer import Tokenizer
from tools import tiny_models
from tools.ours import Ours
from tools.tiny_vocab import byte_symbols
from tools.train_default_model import __main__ as driver
from tools.train_default_model import clean
from tools.train_default_model import decode_attention as attention
from tools.train_default_model.authored import dialogue
from tools.train_default_model.batches import pack
from tools.train_default_model.clean import judge
from tools.train_default_model.encode import align, first_tokens, load_dataset
from tools.train_default_model.generate import GenerateOptions, generate
from tools.train_default_model.model import Geometry, Student, experts_dense, experts_grouped, initialise
from tools.train_default_model.picture import expert_load
from tools.train_default_model.prompts import conversation, held_out_prompts, is_held_out
from tools.train_default_model.rounding import round_weight
from tools.train_default_model.ship import pack_weights, unpack_weights
from tools.train_default_model.shipped import MAX_BYTES, shipped_type
from tools.train_default_model.teacher import Teacher
from tools.train_default_model.tokens import CONTROL, END, SYSTEM, render
from tools.train_default_model.train import load_student
from tools.train_default_model.vocab import load_tokenizer
from tools.train_default_model.work import load_json


@pytest.fixture(scope="module")
def teacher_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama with random weights whose vocabulary has its control tokens where SmolLM2's has them."""
    path = tmp_path_factory.mktemp("teacher") / "teacher.gguf"
    merges = ["Ġ t", "h e", "Ġt he", "e r", "i n", "Ġ a"]
    tokens = [*CONTROL, *byte_symbols(), *(merge.replace(" ", "") for merge in merges)]
    tiny = tiny_models.geometry("llama", "F32", n_vocab=len(tokens), n_layer=2, tied=True)
    writer = gguf.GGUFWriter(path, "llama")
    tiny_models.add_metadata(writer, tiny, "teacher")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(END)
    writer.add_add_bos_token(False)
    for name, values in tiny_models.tensors(tiny).items():
        writer.add_tensor(name, np.ascontiguousarray(values, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def teacher(teacher_path: Path) -> Teacher:
    return Teacher(teacher_path, "cpu", torch.float32)


def test_prompts_are_functions_of_their_number() -> None:
    assert conversation(1, 7) == conversation(1, 7)
    firsts = {conversation(1, i)[0] for i in range(2000)}
    assert len(firsts) > 1500
    assert all(prompt.strip() == prompt and "  " not in prompt for prompt in firsts)
    held = held_out_prompts(20)
    assert len(set(held)) == 20 and all(is_held_out(prompt.encode()) for prompt in held)


def test_written_dialogues_alternate_and_end_with_sentences() -> None:
    for i in range(500):
        turns = dialogue(1, i)
        assert len(turns) % 2 == 0
        assert all(turn.strip() == turn and turn for turn in turns)
        assert all(turn[-1] in '.!?"' for turn in turns[1::2]), turns


@pytest.mark.parametrize(
    ("answer", "is_cut", "reason"),
    [
        ("Owls eat mice. They hunt at night.", False, ""),
        ("Owls eat mice. They hunt at night and then", False, "no end"),
        ("Owls eat mice, birds and many other small animals. They hunt at night and then", True, ""),
        ("Here are three things that you should know about owls:\n\n1.", True, "cut off"),
        ("I was created by OpenAI.", False, "wrong self"),
        ("A game of the mind is a game. A game of the mind is a game.", False, "loop"),
        ("Dear [Your Name], hello.", False, "leftover"),
        ("Привет, как дела.", False, "foreign"),
        ("", False, "empty"),
    ],
)
def test_judge(answer: str, is_cut: bool, reason: str) -> None:
    found, keep = judge(answer, is_cut)
    assert found == reason
    assert answer[:keep].endswith(".") or reason


def test_align_finds_common_boundaries() -> None:
    # ours: "ab" "c" "de", theirs: "a" "b" "cd" "e"
    assert align(np.array([2, 1, 2]), np.array([1, 1, 2, 1])).tolist() == [-1, 1, -1]


def test_pack_begins_rows_with_dialogues() -> None:
    offsets = np.array([0, 3, 10, 14, 20, 26])
    rows = pack(offsets, np.array([2, 0, 4, 1, 3]), 6)
    assert rows.tolist() == [
        [10, 11, 12, 13, 0, 1],
        [20, 21, 22, 23, 24, 25],
        [3, 4, 5, 6, 7, 8],
        [14, 15, 16, 17, 18, 19],
    ]


def test_experts_grouped_are_the_plain_ones() -> None:
    torch.manual_seed(0)
    x, gate_up, down = torch.randn(40, 64), torch.randn(6, 64, 64) / 8, torch.randn(6, 64, 32) / 6
    weights, ids = torch.randn(40, 6).softmax(-1).topk(2)
    results = []
    for run in (experts_dense, experts_grouped):
        leaves = [tensor.clone().requires_grad_() for tensor in (x, gate_up, down, weights)]
        y = run(leaves[0], leaves[1], leaves[2], ids, leaves[3])
        (y * torch.arange(64.0)).sum().backward()
        results.append([y, *(leaf.grad for leaf in leaves)])
    for plain, grouped in zip(*results, strict=True):
        torch.testing.assert_close(grouped, plain, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["Q3_K", "Q4_K", "Q5_K", "Q6_K"])
def test_rounded_weights_survive_ggml(kind: str) -> None:
    from tools.ggml import dequantise, quantise, type_by_name

    weight = torch.randn(32, 512, generator=torch.Generator().manual_seed(1)) * 0.05
    rounded = round_weight(weight, kind)
    file_type = type_by_name(kind)
    kept = torch.from_numpy(dequantise(quantise(rounded.numpy(), file_type), file_type, 512))
    assert (kept - rounded).std() < 0.01 * weight.std()
    assert (rounded - weight).std() < 0.2 * weight.std()


def test_default_geometry_fits_the_file() -> None:
    from tools.ggml import row_bytes, type_by_name

    with torch.device("meta"):
        model = Student(Geometry(), torch.float32, is_grouped=True)
    n_bytes = 400_000  # vocabulary and metadata
    for name, p in model.names().items():
        kind = type_by_name(shipped_type(name, p.ndim, p.shape[-1]))
        n_bytes += p.numel() // p.shape[-1] * row_bytes(kind, p.shape[-1])
    assert n_bytes < MAX_BYTES


def test_packed_weights_come_back() -> None:
    rng = np.random.default_rng(0)
    weights = {"a_exps.weight": rng.standard_normal((2, 4, 64)), "b.weight": rng.standard_normal((4, 8))}
    weights = {name: value.astype(np.float32) for name, value in weights.items()}
    back = unpack_weights(pack_weights(weights))
    assert np.abs(back["a_exps.weight"] - weights["a_exps.weight"]).max() < 0.02
    assert np.allclose(back["b.weight"], weights["b.weight"], rtol=2**-8)


def test_picture(tmp_path: Path) -> None:
    expert_load([[1, 3], [2, 2]], tmp_path / "load.svg")
    assert "75.0" in (tmp_path / "load.svg").read_text()


def test_decode_attention_kernel_in_the_interpreter() -> None:
    if not attention.has_kernel() or torch.cuda.is_available():
        pytest.skip("needs Triton's interpreter")
    q, cache = torch.randn(3, 6, 64), torch.randn(3, 4, 160, 64)
    pos = torch.tensor([0, 70, 159], dtype=torch.int32)
    plain, fast = (attention.decode_attention(q, cache, pos, kernel=kernel) for kernel in (False, True))
    torch.testing.assert_close(fast, plain, rtol=1e-4, atol=1e-5)


def test_teacher_has_our_engines_logits(teacher: Teacher, teacher_path: Path) -> None:
    tokens = teacher.tokenizer.encode(render(["the rain, in 1234?"]), add_special_tokens=False).ids
    assert tokens == Tokenizer(teacher_path).encode(render(["the rain, in 1234?"]), False, True)
    with torch.inference_mode():
        found = teacher.logits(teacher.hidden(torch.tensor([tokens])))[0, -1].numpy()
    with Ours(teacher_path, n_ctx=128, exact=True) as ours:
        expected = ours.prefill(tokens)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-3 * expected.std())


def test_generated_tokens_are_the_engines_greedy_ones(teacher: Teacher, teacher_path: Path, tmp_path: Path) -> None:
    options = GenerateOptions(batch=3, n_ctx=420, max_new=24, is_greedy=True, max_docs=5)
    assert generate(teacher, options, tmp_path, 100)[0] >= 5
    with np.load(tmp_path / "raw-0000.npz") as file:
        tokens, offsets = file["tokens"].tolist(), file["offsets"]
    prefix = teacher.tokenizer.encode(f"<|im_start|>system\n{SYSTEM}<|im_end|>\n", add_special_tokens=False).ids
    head = teacher.tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False).ids
    with Ours(teacher_path, n_ctx=512, exact=True) as ours:
        for doc in (tokens[a:b] for a, b in itertools.pairwise(offsets)):
            start = [i for i, token in enumerate(doc) if token == head[0]][1] + len(head)
            answer = doc[start:]
            assert (
                answer[: len(answer)] == ours.greedy(prefix + doc[:start], len(answer), frozenset({END}))[: len(answer)]
            )


def run(*words: str) -> None:
    """The driver's command line."""
    previous = sys.argv
    sys.argv = ["train_default_model", *words]
    try:
        assert driver.main() == 0
    finally:
        sys.argv = previous


def test_the_whole_recipe_on_a_tiny_teacher(teacher_path: Path, tmp_path: Path) -> None:
    work, out = tmp_path / "work", tmp_path / "out"
    same = ["--work", str(work), "--out", str(out), "--teacher", str(teacher_path), "--device", "cpu", "--jobs", "1"]
    run("generate=0.5", "clean", "pack-text", *same, "--toy")
    clean._start(teacher_path)
    clean._write_authored(2, 0, 30, work / "clean-0001.npz")  # as if the teacher had said it
    run("vocab", "encode", "annotate", *same, "--toy")
    data = load_dataset(work)
    assert data.tokens[data.offsets[1:] - 1].tolist() == [0] * (len(data.offsets) - 1)
    assert 0 < data.answer.mean() < 1
    check_hints(work, teacher_path)
    run("train=1", "dense=1", "ship", *same, "--toy", "--toy-steps", "3")
    assert load_json(work / "dense.json")["steps"] == 3
    back = tmp_path / "back"
    run("unpack", *same, "--work", str(back))
    run("export", *same, "--work", str(back))
    check_export(back)


def check_hints(work: Path, teacher_path: Path) -> None:
    """The first hint is our first token in what the teacher finds likeliest, where it is taken to have spoken."""
    data, teacher = load_dataset(work), Teacher(teacher_path, "cpu", torch.float32)
    mapping = first_tokens(load_tokenizer(work), teacher.pieces)
    ids, probs = (np.load(work / f"hints-{name}.npy") for name in ("ids", "probs"))
    n_checked = 0
    prefix = teacher.tokenizer.encode(f"<|im_start|>system\n{SYSTEM}<|im_end|>\n", add_special_tokens=False).ids
    for a, b, c, d in zip(
        data.offsets[:-1], data.offsets[1:], data.teacher_offsets[:-1], data.teacher_offsets[1:], strict=True
    ):
        source, theirs = data.source[a:b], data.teacher[c:d]
        if (source < 0).all():
            assert not probs[a:b].any()
        elif teacher.pieces[theirs[1]].startswith(b"u"):
            tokens = torch.tensor([[*prefix, *theirs.tolist()]])
            with torch.inference_mode():
                best = teacher.logits(teacher.hidden(tokens))[0].argmax(-1).numpy()
            for j in np.flatnonzero(data.answer[a:b] & (source >= 0)):
                assert ids[a + j, 0] == mapping[best[len(prefix) + source[j]]]
                n_checked += 1
    assert n_checked > 200


def check_export(work: Path) -> None:
    """The F32 file has the checkpoint's logits in our engine."""
    path = work / "student-F32.gguf"
    tokenizer = Tokenizer(path)
    text = render(["It's 2024, isn't it?\n\n  Two  spaces"])
    tokens = tokenizer.encode(text, False, True)
    assert tokens == load_tokenizer(work).encode(text, add_special_tokens=False).ids
    assert tokenizer.eog_tokens >= {END}
    asked = prompt_tokens(tokenizer, load_template(None, tokenizer), [{"role": "user", "content": "Hello"}])
    assert tokenizer.decode(asked, special=True) == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    geometry = Geometry(**load_json(work / "student.json")["geometry"])
    model = Student(geometry, torch.float32, is_grouped=True)
    weights = load_student(work, "student")
    with torch.no_grad():
        for name, p in model.names().items():
            value = weights[name]
            p.copy_(round_weight(value, shipped_type(name, value.ndim, value.shape[-1])))
        hidden, _, _ = model.hidden(torch.tensor([tokens]))
        expected = (hidden @ model.token_embd.T)[0, -1].numpy()
    with Ours(path, n_ctx=128, exact=True) as ours:
        found = ours.prefill(tokens)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4 * expected.std())


def test_initial_values_cover_all_weights() -> None:
    model = Student(Geometry(n_vocab=300, n_layer=1), torch.float32, is_grouped=True)
    values = initialise(model, 1)
    assert {name: p.shape for name, p in model.names().items()} == {name: v.shape for name, v in values.items()}
