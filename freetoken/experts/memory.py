"""The memory behind the slots: one tensor a pool, and where in a slot each layer's matrices stand.

Sizes come from here (`slot_sizes`) before the pools are planned; `SlotMemory.fill` copies what a step chose.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from freetoken.experts.bank import LayerBanks
from freetoken.experts.slots import Pool, SlotState
from freetoken.kernels import layout
from freetoken.kernels.fills import SLOW_UNIT, FillBank, Slow, fill, fill_bank
from freetoken.kernels.slots import StepOutputs

__all__ = ["SlotMemory", "slot_sizes"]


def slot_sizes(layers: Sequence[LayerBanks | None]) -> list[int]:
    """Bytes of one expert's slot in each layer, 0 for a layer that takes none."""
    return [0 if layer is None else sum(_matrix_bytes(layer)) for layer in layers]


def _matrix_bytes(layer: LayerBanks) -> list[int]:
    return [layout.slot_bytes(bank.type, bank.rows, bank.cols) for bank in layer.banks]


class SlotMemory:
    """`pools[layer]` uint8 [n_slots, slot_bytes] of the layer's pool, `offsets[layer]` where gate, up and down start in
    a slot. The mapping must stay open; its pages need to be registered before the first fill."""

    def __init__(
        self,
        layers: Sequence[LayerBanks | None],
        state: SlotState,
        device: torch.device | str,
        slow_fills: float = 0.0,
    ) -> None:
        """`slow_fills`, for tests: fills move so many times their bytes (`slow_down`); 0 leaves that out for good."""
        self._slow: torch.Tensor | None = None
        self._n_experts = [0 if layer is None else layer.banks[0].n_expert for layer in layers]
        if slow_fills:
            self._slow = torch.zeros(1, dtype=torch.int32, device=device)
            self.slow_down(slow_fills)
        memory = {
            pool: torch.empty((pool.n, pool.slot_bytes), dtype=torch.uint8, device=device) for pool in state.pools
        }
        self._memory = memory
        self.pools = {layer: memory[pool] for layer, pool in state.pool_of.items()}
        self.offsets: dict[int, tuple[int, ...]] = {}
        self._banks: dict[int, tuple[FillBank, ...]] = {}
        for i in state.pool_of:
            layer = layers[i]
            if layer is None:
                raise ValueError(f"layer {i} has slots, but no experts")
            sizes = _matrix_bytes(layer)
            self.offsets[i] = tuple(sum(sizes[:n]) for n in range(len(sizes)))
            self._banks[i] = tuple(
                fill_bank(bank.type, bank.rows, bank.cols, bank.address, at, device, bank.stride)
                for bank, at in zip(layer.banks, self.offsets[i], strict=True)
            )

    def of_pool(self, pool: Pool) -> torch.Tensor:
        """A pool's slots, uint8 [n_slots, slot_bytes]."""
        return self._memory[pool]

    def banks(self, layer: int) -> tuple[FillBank, ...]:
        """A layer's banks as the fill kernel reads them."""
        return self._banks[layer]

    def fill(self, layer: int, step: StepOutputs) -> None:
        """One launch that copies the fills of a layer's step into their slots."""
        slow = None if self._slow is None else Slow(self._slow, self._n_experts[layer])
        fill(self._banks[layer], self.pools[layer], step.fill_expert, step.fill_slot, step.counts, slow=slow)

    def slow_down(self, factor: float) -> None:
        """Let fills move so many times their bytes, at least 1, from the next step on."""
        if self._slow is None:
            raise ValueError("slots were made without the possibility of slow fills")
        self._slow.fill_(round(max(factor, 1.0) * SLOW_UNIT))
