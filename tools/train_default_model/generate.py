"""Stage `generate`: the teacher answers prompts, thousands at once, and whole dialogues go to shards.

Every sequence has a row of a static key-value cache. A step feeds one token a row: while a row's forced tokens (the
user's turn) last, they follow; then sampled ones. So there is no prefill; the system message stands in every row from
the start. One step is compiled, captured as a CUDA graph and replayed; after each CHUNK of steps the host takes
finished rows and gives them the next turn or the next prompt.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from tools.train_default_model.compiling import compiled
from tools.train_default_model.decode_attention import decode_attention, has_kernel
from tools.train_default_model.prompts import conversation
from tools.train_default_model.teacher import Teacher, layer_in, layer_out, rms_norm
from tools.train_default_model.tokens import END, PAD, SYSTEM
from tools.train_default_model.work import Clock, save_arrays, say

__all__ = ["GenerateOptions", "generate"]

CHUNK = 16
MAX_FORCED = 96
SHARD_DOCS = 8_000


@dataclass(frozen=True)
class GenerateOptions:
    """Sizes and sampling. Tokens below `min_p` times the likeliest one's probability are never drawn."""

    batch: int = 2048
    n_ctx: int = 512
    max_new: int = 320
    temperature: float = 0.65
    min_p: float = 0.1
    seed: int = 1
    system: str = SYSTEM
    is_greedy: bool = False
    is_compiled: bool = True
    has_kernel: bool = True
    """Attention by our Triton kernel where there is a GPU; else by torch's, over the whole cache."""
    max_docs: int = 1 << 40


class Stepper:
    """The device's side: state of every row, and one step of all."""

    def __init__(self, teacher: Teacher, options: GenerateOptions, prefix: list[int]) -> None:
        device = teacher.embedding.device
        n, self.options, self.teacher = options.batch, options, teacher
        self.is_cuda = device.type == "cuda"
        self._kernel = self.is_cuda and options.has_kernel and has_kernel()
        shape = (n, 2 * teacher.n_kv, options.n_ctx, teacher.head_dim)
        self.caches = [torch.zeros(shape, dtype=teacher.embedding.dtype, device=device) for _ in range(teacher.n_layer)]
        self._fill_prefix(prefix)
        self.rows = torch.arange(n, device=device)
        self.current = torch.zeros(n, dtype=torch.int32, device=device)
        self.pos = torch.full((n,), len(prefix), dtype=torch.int32, device=device)
        self.forced = torch.zeros((n, MAX_FORCED), dtype=torch.int32, device=device)
        self.n_forced = torch.zeros(n, dtype=torch.int32, device=device)
        self.index = torch.zeros(n, dtype=torch.int32, device=device)
        self.done = torch.ones(n, dtype=torch.bool, device=device)
        self.out = torch.full((CHUNK, n), -1, dtype=torch.int32, device=device)
        self.column = torch.zeros(1, dtype=torch.int64, device=device)
        self._compile()
        self._replay: Callable[[], None] | None = None

    def _fill_prefix(self, prefix: list[int]) -> None:
        keep: list[tuple[torch.Tensor, torch.Tensor]] = []
        device = self.teacher.embedding.device
        self.teacher.hidden(torch.tensor([prefix], device=device), keep)
        for cache, (k, v) in zip(self.caches, keep, strict=True):
            cache[:, :, : len(prefix)] = torch.cat([k, v], dim=2).transpose(1, 2)

    def _compile(self) -> None:
        is_wanted = self.options.is_compiled and self.is_cuda
        self._in = compiled(layer_in, is_wanted=is_wanted)
        self._out = compiled(layer_out, is_wanted=is_wanted)
        self._choose = compiled(self._sample, is_wanted=is_wanted)

    def _sample(self, x: torch.Tensor) -> torch.Tensor:
        """The next token of each row by Gumbel's trick, from the last layer's output."""
        teacher, options = self.teacher, self.options
        logits = teacher.logits(rms_norm(x, teacher.norm, teacher.eps)).float()
        if options.is_greedy:
            return logits.argmax(-1).int()
        logits = logits / options.temperature
        floor = logits.amax(-1, keepdim=True) + math.log(options.min_p)
        noise = -torch.log(-torch.log(torch.rand_like(logits).clamp(1e-20, 1 - 1e-7)))
        return torch.where(logits >= floor, logits + noise, -torch.inf).argmax(-1).int()

    def _step(self) -> None:
        """Feed `current` at `pos`; choose what follows; a row that is done stands still."""
        t = self.teacher
        pos = self.pos.long()
        cos, sin = t.cos[pos], t.sin[pos]
        x = t.embedding[self.current.long()]
        for layer, cache in zip(t.layers, self.caches, strict=True):
            q, k, v = self._in(x, layer.attn_norm, layer.qkv, cos, sin, t.n_head, t.n_kv, t.eps)
            cache[self.rows, :, pos] = torch.cat([k, v], dim=1)
            y = decode_attention(q.contiguous(), cache, self.pos, kernel=self._kernel)
            y = y.flatten(1)
            x = self._out(x, y, layer.attn_output, layer.ffn_norm, layer.gate_up, layer.ffn_down, t.eps)
        self._advance(self._choose(x))

    def _advance(self, sampled: torch.Tensor) -> None:
        is_forced = self.index < self.n_forced
        at = self.index.clamp(max=MAX_FORCED - 1).long()[:, None]
        following = torch.where(is_forced, self.forced.gather(1, at)[:, 0], sampled)
        live = ~self.done
        self.out[self.column] = torch.where(live, following, -1)[None]
        self.column.add_(1)
        self.current.copy_(torch.where(live, following, self.current))
        self.pos.add_(live.int())
        self.index.add_(live.int())
        is_end = ~is_forced & ((following == END) | (following == PAD))
        is_long = (self.index - self.n_forced >= self.options.max_new) | (self.pos >= self.options.n_ctx - 1)
        self.done.logical_or_(is_end | is_long)

    def run_chunk(self) -> None:
        """CHUNK steps."""
        self.column.zero_()
        if not self.is_cuda:
            for _ in range(CHUNK):
                self._step()
            return
        if self._replay is None:
            self._replay = self._capture()
        for _ in range(CHUNK):
            self._replay()

    def _capture(self) -> Callable[[], None]:
        """Warm up and record: what runs one step. What the warm-up did to the rows is undone.

        Where our kernel fails, torch's attention is taken; where recording fails, steps run unrecorded.
        """
        state = (self.current, self.pos, self.index, self.done, self.out, self.column)
        saved = [x.clone() for x in state]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            try:
                self._step()
            except Exception as error:
                if not self._kernel:
                    raise
                say("generate", f"the attention kernel failed ({type(error).__name__}: {str(error)[:400]})")
                self._kernel = False
            for _ in range(2):
                self._step()
        torch.cuda.current_stream().wait_stream(side)
        run: Callable[[], None] = self._step
        try:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._step()
            run = graph.replay
        except Exception as error:
            say("generate", f"recording a step failed ({type(error).__name__}: {str(error)[:400]})")
        for x, value in zip(state, saved, strict=True):
            x.copy_(value)
        return run


@dataclass
class Row:
    """What the host plans for one row: the user turns still to be asked."""

    turns: list[list[int]] = field(default_factory=list)
    is_idle: bool = True


class Generator:
    """The host's side: hands out turns, collects dialogues, writes shards."""

    def __init__(self, teacher: Teacher, options: GenerateOptions, folder: Path) -> None:
        self._encode = lambda text: teacher.tokenizer.encode(text, add_special_tokens=False).ids
        self.prefix: list[int] = self._encode(f"<|im_start|>system\n{options.system}<|im_end|>\n")
        self.stepper = Stepper(teacher, options, self.prefix)
        self._options, self._folder = options, folder
        self._rows = [Row() for _ in range(options.batch)]
        self._history = np.zeros((options.batch, options.n_ctx + 1), dtype=np.uint16)
        self._lengths = np.zeros(options.batch, dtype=np.int64)
        self._docs: list[np.ndarray] = []
        self._shards = sorted(folder.glob("raw-*.npz"))
        starts = [int(np.load(shard)["next"]) for shard in self._shards]
        self._next = max(starts, default=0)
        self._ready: deque[tuple[int, list[list[int]]]] = deque()
        """Conversations in tokens, each with its number, made while the device works."""
        self.n_docs = self.n_tokens = 0

    def user_turn(self, text: str) -> list[int]:
        """A user's turn and the head of the answer, in the teacher's tokens."""
        return self._encode(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n")

    def run(self, clock: Clock) -> None:
        """Until the clock or the wanted number of dialogues ends it; what is finished then is kept."""
        s = self.stepper
        newline = self._encode("\n")
        while not clock.is_over and self.n_docs < self._options.max_docs:
            self._refill(newline)
            s.run_chunk()
            self._prepare(self._options.batch // 2)
            self._collect()
            if len(self._docs) >= SHARD_DOCS:
                self._flush()
            if clock.is_due():
                rate = self.n_tokens / clock.elapsed_s
                say("generate", f"{self.n_docs} dialogues, {self.n_tokens / 1e6:.2f} M tokens, {rate / 1e3:.1f} k/s")
        self._flush()

    def _collect(self) -> None:
        """Take the chunk's tokens to their rows."""
        for new in self.stepper.out.cpu().numpy():
            live = np.flatnonzero(new >= 0)
            self._history[live, self._lengths[live]] = new[live]
            self._lengths[live] += 1

    def _refill(self, newline: list[int]) -> None:
        """Finished rows get their next turn, or hand in their dialogue and get the next prompt."""
        s = self.stepper
        state = [x.cpu() for x in (s.current, s.pos, s.forced, s.n_forced, s.index, s.done)]
        current, pos, forced, n_forced, index, done = (x.numpy() for x in state)
        for b in np.flatnonzero(done):
            row = self._rows[b]
            is_cut = self._history[b, self._lengths[b] - 1] != END
            if not row.is_idle and row.turns and not is_cut and pos[b] < self._options.n_ctx - 2 * MAX_FORCED:
                stream = newline + row.turns.pop(0)
            else:
                if not row.is_idle:
                    self._hand_in(self._history[b, : self._lengths[b]].copy())
                stream = self._begin(row)
                current[b], pos[b] = stream[0], len(self.prefix)
                self._history[b, 0], self._lengths[b] = stream[0], 1
                stream = stream[1:]
            forced[b, : len(stream)] = stream
            n_forced[b], index[b], done[b] = len(stream), 0, False
        for tensor, value in zip((s.current, s.pos, s.forced, s.n_forced, s.index, s.done), state, strict=True):
            tensor.copy_(value)

    def _begin(self, row: Row) -> list[int]:
        """The next conversation whose turns fit."""
        self._prepare(1)
        number, turns = self._ready.popleft()
        self._next = number + 1
        row.turns, row.is_idle = turns[1:], False
        return turns[0]

    def _prepare(self, n: int) -> None:
        """Have `n` conversations ready."""
        number = self._ready[-1][0] + 1 if self._ready else self._next
        while len(self._ready) < n:
            turns = [self.user_turn(text) for text in conversation(self._options.seed, number)]
            if all(len(turn) < MAX_FORCED for turn in turns):
                self._ready.append((number, turns))
            number += 1

    def _hand_in(self, tokens: np.ndarray) -> None:
        self._docs.append(tokens)
        self.n_docs += 1
        self.n_tokens += len(tokens)

    def _flush(self) -> None:
        if not self._docs:
            return
        path = self._folder / f"raw-{len(self._shards):04d}.npz"
        offsets = np.cumsum([0, *map(len, self._docs)])
        save_arrays(path, {"tokens": np.concatenate(self._docs), "offsets": offsets, "next": np.array(self._next)})
        self._shards.append(path)
        self._docs = []


@torch.inference_mode()
def generate(teacher: Teacher, options: GenerateOptions, folder: Path, budget_s: float) -> tuple[int, int]:
    """Run the stage; (dialogues, tokens) of this run."""
    clock = Clock(budget_s)
    generator = Generator(teacher, options, folder)
    generator.run(clock)
    say("generate", f"{generator.n_docs} dialogues, {generator.n_tokens} tokens in {clock.elapsed_s:.0f} s")
    return generator.n_docs, generator.n_tokens
