"""Stage `annotate`: the teacher's likeliest next tokens for every answer token, once for all epochs.

The vocabularies differ: a prediction of the teacher counts where one of our tokens begins at the end of one of its
tokens, and each of its tokens stands for the first of our tokens in it. Tokens that map to the same one of ours simply
occur twice. `ids` and `probs` [n, TOP] lie beside the dataset's tokens; probs 0 where nothing is known.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from tools.train_default_model.encode import Dataset, first_tokens, load_dataset
from tools.train_default_model.teacher import Teacher
from tools.train_default_model.tokens import SYSTEM
from tools.train_default_model.vocab import load_tokenizer
from tools.train_default_model.work import Clock, save_json, say

__all__ = ["TOP", "annotate", "load_hints"]

TOP = 16
GROUP = 1 << 15
"""Dialogues sorted by length together, so that little is padded; groups come in random order."""


class Annotator:
    """The teacher over batches of dialogues; results stay on the device until they are saved."""

    def __init__(self, data: Dataset, teacher: Teacher, mapping: np.ndarray, temperature: float, rows: int) -> None:
        device = teacher.embedding.device
        self._data, self._teacher, self._temperature, self._rows = data, teacher, temperature, rows
        self._mapping = torch.from_numpy(mapping).to(device, torch.int16)
        n = len(data.tokens)
        self.ids = torch.zeros((n, TOP), dtype=torch.int16, device=device)
        self.probs = torch.zeros((n, TOP), dtype=torch.float16, device=device)
        encode = teacher.tokenizer.encode
        self._prefix = np.array(encode(f"<|im_start|>system\n{SYSTEM}<|im_end|>\n", add_special_tokens=False).ids)
        self._system = encode("<|im_start|>system\n", add_special_tokens=False).ids[:2]
        self._end = encode("<|im_end|>", add_special_tokens=False).ids[0]

    def batch(self, docs: np.ndarray) -> int:
        """Annotate some dialogues; the number of our tokens that got hints."""
        data, device = self._data, self.ids.device
        streams, wanted, targets = [], [], []
        for d in docs:
            tokens = data.teacher[data.teacher_offsets[d] : data.teacher_offsets[d + 1]]
            n_own = self._own_system(tokens)
            streams.append(np.concatenate([self._prefix, tokens[n_own:]]))
            a, b = data.offsets[d], data.offsets[d + 1]
            at = np.flatnonzero(data.answer[a:b] & (data.source[a:b] >= n_own))
            wanted.append(data.source[a:b][at].astype(np.int64) - n_own + len(self._prefix))
            targets.append(a + at)
        length = -(-max(map(len, streams)) // 64) * 64
        grid = np.zeros((len(docs), length), dtype=np.int64)
        for row, stream in zip(grid, streams, strict=True):
            row[: len(stream)] = stream
        hidden = self._teacher.hidden(torch.from_numpy(grid).to(device)).flatten(0, 1)
        source = np.concatenate([w + i * length for i, w in enumerate(wanted)])
        target = np.concatenate(targets)
        where, to = torch.from_numpy(source).to(device), torch.from_numpy(target).to(device)
        for k in range(0, len(source), self._rows):
            part, out = where[k : k + self._rows], to[k : k + self._rows]
            logits = self._teacher.logits(hidden[part])
            total = torch.logsumexp(logits.float() / self._temperature, -1, keepdim=True)
            values, found = logits.topk(TOP, dim=-1)
            self.ids[out] = self._mapping[found]
            self.probs[out] = torch.exp(values.float() / self._temperature - total).half()
        return len(source)

    def _own_system(self, tokens: np.ndarray) -> int:
        """Tokens of the dialogue's own system turn, which the teacher's own replaces."""
        if tokens[:2].tolist() != self._system:
            return 0
        return int(np.flatnonzero(tokens == self._end)[0]) + 2


@torch.inference_mode()
def annotate(
    folder: Path, teacher: Teacher, *, budget_s: float, temperature: float, batch_tokens: int = 1 << 17
) -> None:
    """Annotate in random order until the time is over, and save what there is."""
    clock = Clock(budget_s)
    data = load_dataset(folder)
    mapping = first_tokens(load_tokenizer(folder), teacher.pieces)
    annotator = Annotator(data, teacher, mapping, temperature, rows=16384)
    lengths = np.diff(data.teacher_offsets) + 32
    order = np.random.default_rng(0).permutation(len(lengths))
    done = 0
    for g in range(0, len(order), GROUP):
        group = order[g : g + GROUP]
        group = group[np.argsort(lengths[group])]
        ends = np.cumsum(lengths[group]) // batch_tokens
        for docs in np.split(group, np.flatnonzero(np.diff(ends)) + 1):
            done += annotator.batch(docs)
            if clock.is_due():
                say("annotate", f"{done / 1e6:.2f} M tokens, {done / clock.elapsed_s / 1e3:.0f} k/s")
            if clock.is_over:
                break
        if clock.is_over:
            break
    for name, tensor in (("ids", annotator.ids), ("probs", annotator.probs)):
        partial = folder / f"hints-{name}.part.npy"
        np.save(partial, tensor.cpu().numpy())
        partial.rename(folder / f"hints-{name}.npy")
    n_answer = int(data.answer.sum())
    save_json(folder / "hints.json", {"hinted": done, "answer_tokens": n_answer})
    say("annotate", f"{done / 1e6:.2f} M of {n_answer / 1e6:.2f} M answer tokens, {clock.elapsed_s:.0f} s")


def load_hints(folder: Path, n: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor] | None:
    """(ids, probs) on the device, or None where the stage did not run for this dataset."""
    paths = [folder / f"hints-{name}.npy" for name in ("ids", "probs")]
    if not all(path.exists() for path in paths):
        return None
    ids, probs = (torch.from_numpy(np.load(path)) for path in paths)
    if len(ids) != n:
        say("train", f"the hints are for {len(ids)} tokens, the dataset has {n}: they are left out")
        return None
    return ids.to(device), probs.to(device)
