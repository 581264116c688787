"""fp32 originals of the student's weights and their updates: Muon for matrices, AdamW for the rest.

After each step the student's parameters are written from the originals, on request rounded to the shipped types.
"""

from __future__ import annotations

import torch

from tools.train_default_model.model import Student
from tools.train_default_model.rounding import round_weight
from tools.train_default_model.shipped import shipped_type

__all__ = ["Optimizer"]

MUON_LR = 0.02
MUON_DECAY = 0.01
MUON_MOMENTUM = 0.95
ADAM_BETAS = (0.9, 0.95)
ADAM_RATES = {"token_embd": 2e-3, "ffn_gate_inp": 1e-3}
ADAM_RATE = 1e-3


def orthogonalise(update: torch.Tensor) -> torch.Tensor:
    """About U V^T of each [rows <= columns] matrix's singular value decomposition (Newton-Schulz, five steps)."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = update.bfloat16() if update.is_cuda else update
    x = x / (x.float().norm(dim=(-2, -1), keepdim=True) + 1e-7).to(x.dtype)
    for _ in range(5):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x.float()


class _Matrices:
    """Matrices of one shape, stacked and turned so that rows <= columns; a stack of experts counts as many."""

    def __init__(self, members: list[tuple[str, torch.nn.Parameter]], masters: dict[str, torch.Tensor]) -> None:
        self.members = members
        shape = members[0][1].shape[-2:]
        self.is_turned = shape[0] > shape[1]
        self.scale = max(1.0, shape[0] / shape[1]) ** 0.5
        self.master = self._stack([masters[name].to(p.device, torch.float32) for name, p in members])
        self.momentum = torch.zeros_like(self.master)
        self._counts = [p.numel() // (shape[0] * shape[1]) for _, p in members]

    def _stack(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        flat = torch.cat([t.reshape(-1, *t.shape[-2:]) for t in tensors])
        return flat.mT.contiguous() if self.is_turned else flat

    def step(self, rate: float) -> None:
        grad = self._stack([p.grad for _, p in self.members if p.grad is not None]).float()
        self.momentum.lerp_(grad, 1 - MUON_MOMENTUM)
        update = orthogonalise(grad.lerp(self.momentum, MUON_MOMENTUM))
        self.master.mul_(1 - rate * MUON_LR * MUON_DECAY).add_(update, alpha=-rate * MUON_LR * self.scale)

    def values(self) -> list[tuple[str, torch.nn.Parameter, torch.Tensor]]:
        """(name, parameter, original in the parameter's shape)."""
        parts = self.master.split(self._counts)
        turned = [part.mT if self.is_turned else part for part in parts]
        return [(name, p, part.reshape(p.shape)) for (name, p), part in zip(self.members, turned, strict=True)]


class _Other:
    """One tensor under AdamW without decay."""

    def __init__(self, name: str, parameter: torch.nn.Parameter, master: torch.Tensor) -> None:
        self.name, self.parameter = name, parameter
        self.master = master.to(parameter.device, torch.float32).clone()
        self.mean, self.square = torch.zeros_like(self.master), torch.zeros_like(self.master)
        self.rate = next((rate for key, rate in ADAM_RATES.items() if key in name), ADAM_RATE)

    def step(self, rate: float, n: int) -> None:
        assert self.parameter.grad is not None
        grad = self.parameter.grad.float()
        first, second = ADAM_BETAS
        self.mean.lerp_(grad, 1 - first)
        self.square.lerp_(grad.square(), 1 - second)
        bias = (1 - second**n) ** 0.5 / (1 - first**n)
        self.master.addcdiv_(self.mean, self.square.sqrt().add_(1e-12), value=-rate * self.rate * bias)


class Optimizer:
    """All weights of a student."""

    def __init__(self, model: Student, masters: dict[str, torch.Tensor]) -> None:
        groups: dict[tuple[int, ...], list[tuple[str, torch.nn.Parameter]]] = {}
        self._others = []
        for name, parameter in model.names().items():
            if parameter.ndim < 2 or "token_embd" in name or "ffn_gate_inp" in name:
                self._others.append(_Other(name, parameter, masters[name]))
            else:
                groups.setdefault(tuple(parameter.shape[-2:]), []).append((name, parameter))
        self._matrices = [_Matrices(members, masters) for members in groups.values()]
        self._n_steps = 0
        self.is_rounding = False
        self.write()

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """One update with all rates times `rate`; gradients are dropped."""
        self._n_steps += 1
        for group in self._matrices:
            group.step(rate)
        for other in self._others:
            other.step(rate, self._n_steps)
        self.write()

    @torch.no_grad()
    def write(self) -> None:
        """Write the originals into the student's parameters, rounded to the shipped types if `is_rounding`."""
        for name, parameter, master in self._values():
            if self.is_rounding:
                master = round_weight(master, shipped_type(name, master.ndim, master.shape[-1]))
            parameter.copy_(master)
            parameter.grad = None

    def masters(self) -> dict[str, torch.Tensor]:
        """The originals by GGUF's names, on the CPU."""
        return {name: master.detach().cpu().contiguous() for name, _, master in self._values()}

    def _values(self) -> list[tuple[str, torch.nn.Parameter, torch.Tensor]]:
        out = [value for group in self._matrices for value in group.values()]
        return out + [(other.name, other.parameter, other.master) for other in self._others]
