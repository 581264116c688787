"""Which requests `kernels.sampler` can sample on the GPU, and the parameters of their rows.

The caller writes a row's parameters once, hands over `Sampler.draw_ahead` for each token, and tells the sampler by
`Sampler.take_ahead` of each token that came back with status 0. A row with status 1 is sampled on the host, by the same
number. So tokens drawn here and there use one stream of random numbers in one order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from freetoken.kernels.bias import N_BIASES
from freetoken.kernels.sampler import MAX_TOP_K, Mode
from freetoken.sampler import Sampler

__all__ = ["GREEDY", "DeviceParams", "device_chain"]

_ORDER = ("top_k", "top_p", "min_p", "temperature")
_OFF_TOP_P = 2.0


@dataclass(frozen=True)
class DeviceParams:
    """Parameters of a row as the kernel takes them; the numbers are fp32. `DeviceParams(Mode.HOST)` leaves it alone."""

    mode: Mode
    top_k: int = 0
    min_keep: int = 0
    top_p: float = _OFF_TOP_P
    log_min_p: float = -np.inf
    temperature: float = 1.0
    biases: tuple[np.ndarray, np.ndarray] | None = None
    """Tokens, all different, and what is added to their logits, fp32; at most N_BIASES."""

    def write(self, row: np.ndarray) -> None:
        """Fill a row, int32 [N_FIELDS]."""
        row[:3] = self.mode, self.top_k, self.min_keep
        row[3:6] = np.array([self.top_p, self.log_min_p, self.temperature], np.float32).view(np.int32)

    def write_biases(self, row: np.ndarray) -> None:
        """Fill a row of `kernels.bias`, int32 [2, N_BIASES]."""
        row[0] = -1
        if self.biases is not None:
            tokens, values = self.biases
            row[0, : len(tokens)] = tokens
            row[1, : len(tokens)] = values.astype(np.float32).view(np.int32)


GREEDY = DeviceParams(Mode.GREEDY)


def device_chain(sampler: Sampler) -> DeviceParams | None:
    """How the kernel samples this request; None where the host must. Covered are, with biases and bans of at most
    N_BIASES tokens, without n_probs, penalties, DRY, mirostat, dynamic temperature and other steps:

    * greedy requests: a temperature of 0 or less, whatever else is set that leaves the largest logit;
    * top_k 1 to MAX_TOP_K with any of top_p, min_p (and min_keep) and temperature after it in the default order;
    * top_k off, top_p off, with min_p up to 1 (min_keep up to 1) and temperature. A top_k above MAX_TOP_K is for the
      host even if it holds the whole vocabulary: it sorts the candidates, so a number means another token.
    """
    p, active = sampler.params, sampler.active_steps
    biases = sampler.biases if len(sampler.biases[0]) else None
    if p.n_probs or len(sampler.biases[0]) > N_BIASES:
        return None
    if sampler.is_greedy:
        return None if active else DeviceParams(Mode.GREEDY, biases=biases)
    if sampler.has_mirostat or active != tuple(name for name in _ORDER if name in active):
        return None
    with np.errstate(all="ignore"):
        temperature = np.float32(p.temperature if "temperature" in active else 1.0)
        log_min_p = np.log(np.float32(p.min_p)) if "min_p" in active else np.float32(-np.inf)
        top_p = np.float32(p.top_p if "top_p" in active else _OFF_TOP_P)
    if not np.isfinite(temperature) or ("temperature" in active and p.dynatemp_range > 0):
        return None
    mode = Mode.LIST if "top_k" in active else Mode.ALL
    if mode == Mode.LIST and p.top_k > MAX_TOP_K:
        return None
    if mode == Mode.ALL and ("top_p" in active or log_min_p > 0 or ("min_p" in active and p.min_keep > 1)):
        return None
    return DeviceParams(
        mode=mode,
        top_k=p.top_k if mode == Mode.LIST else 0,
        min_keep=min(p.min_keep, MAX_TOP_K),
        top_p=float(top_p),
        log_min_p=float(log_min_p),
        temperature=float(max(temperature, np.float32(0))),
        biases=biases,
    )
