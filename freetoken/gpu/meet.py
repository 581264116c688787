"""Where the CPU joins a step on the GPU: a layer's CPU set goes there in the middle of it, and its rows come back.

Per layer the GPU hands over the input rows and the experts of the CPU set (`kernels.handover`), asks, works on its own
experts, waits and takes the CPU's rows. A place of `experts.executor` belongs to one layer of steps of so many rows;
the memory that crosses is the same for all of them, since the stream brings one layer after another: what the next one
hands over is written when this one's rows have been taken.

Asking and waiting are operations of the stream on memory, or host functions where those do not work in a graph; without
a card (Triton's interpreter) plain calls at the same points.
"""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from freetoken import native, quants
from freetoken.errors import EngineError
from freetoken.experts.bank import LayerBanks
from freetoken.experts.executor import ASKED, DONE, PLACE_BYTES, Executor
from freetoken.gpu import driver
from freetoken.kernels.activations import MAX_TOKENS
from freetoken.kernels.handover import clear_places, hand_over, take_rows

__all__ = ["Meetings", "StreamCall"]

logger = logging.getLogger(__name__)

LIMIT_S = 0.7
"""Of one layer's answer: more than any CPU takes, and less than a second with what else an error takes."""
RETURN_S = 0.2
"""How long a thread that was given up may take to come back before steps go on without it."""
Launch = Callable[[], None]


@dataclass(frozen=True)
class StreamCall:
    """A launch that is no kernel: not to be made when kernels are only compiled."""

    call: Launch

    def __call__(self) -> None:
        self.call()


class Meetings:
    """The CPU's part of the steps of one engine; used by its thread. The pool outlives it."""

    def __init__(
        self,
        pool: native.Pool,
        layers: Sequence[LayerBanks | None],
        n_used: int,
        device: torch.device,
        n_planes: int,
        limit_s: float = LIMIT_S,
    ) -> None:
        some = next(layer for layer in layers if layer is not None)
        self._n_embd = some.banks[2].rows
        self.n_expert = max(layer.banks[0].n_expert for layer in layers if layer is not None)
        self._pool, self._layers, self._n_used, self._n_planes = pool, layers, n_used, n_planes
        self._device = device
        n_pairs = MAX_TOKENS * n_used
        self._flags = self._shared(torch.int64, MAX_TOKENS * len(layers) * PLACE_BYTES // 8)
        self._x = self._shared(torch.float32, MAX_TOKENS, self._n_embd)
        self._ids = self._shared(torch.int32, n_pairs)
        self._rows = self._shared(torch.float32, n_pairs, self._n_embd)
        self._on_device = torch.zeros(1, device=device)
        self.executor = Executor(pool, self._flags.numpy().view(np.uint8), limit_s)
        self._activations: dict[int, np.ndarray] = {}
        self._scratch = native.aligned(
            native.experts_scratch_bytes(
                MAX_TOKENS,
                n_used,
                self._n_embd,
                max(layer.banks[0].rows for layer in layers if layer is not None),
                pool.n_threads,
            )
        )
        self._set: set[int] = set()
        self._is_away = False
        self.has_memory_operations = device.type == "cuda" and driver.has_memory_operations(device.index or 0)
        if device.type == "cuda" and not self.has_memory_operations:
            logger.info("%s: no operations on memory in graphs: experts on the CPU are met by host functions", device)

    def _shared(self, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        """Zeroed memory that host and device see at one address, aligned to 64 bytes."""
        if self._device.type == "cuda":
            return torch.zeros(shape, dtype=dtype, pin_memory=True)
        n_bytes = int(np.prod(shape)) * dtype.itemsize
        return torch.from_numpy(native.aligned(n_bytes)).view(dtype).view(shape)

    # --- launches of a program --------------------------------------------------------------------------------------

    def place(self, n: int, layer: int) -> int:
        """The place of a layer with n rows: fewer than the step's in a last layer of which few are wanted."""
        return (n - 1) * len(self._layers) + layer

    def clear(self, places: Sequence[int]) -> list[Launch]:
        """What a step that asks at these places begins with."""
        n_layer = len(self._layers)
        return [
            partial(clear_places, self._flags, i * n_layer, n_layer, self._on_device)
            for i in sorted({place // n_layer for place in places})
        ]

    def ask(
        self, layer: int, x: torch.Tensor, ids: torch.Tensor, routes: torch.Tensor, activation: str
    ) -> list[Launch]:
        """What asks for a layer's CPU set: pairs of `ids` that `routes`, both int32 [n, k], has no slot for; x fp32
        [n, n_embd] are the experts' input rows."""
        n = len(x)
        place = self.place(n, layer)
        if place not in self._set:
            self.executor.set(place, self._program(layer, n, activation))
            self._set.add(place)
        host_ids = self._ids[: ids.numel()]
        return [
            partial(hand_over, x, ids, routes, self.n_expert, self._x[:n], host_ids),
            StreamCall(partial(self._ask, place)),
        ]

    def answer(self, layer: int, ids: torch.Tensor, routes: torch.Tensor, rows: torch.Tensor) -> list[Launch]:
        """What waits for the CPU's rows and puts them into `rows` fp32 [pairs, n_embd]."""
        return [
            StreamCall(partial(self._wait, self.place(len(ids), layer))),
            partial(take_rows, ids, routes, self.n_expert, self._rows[: len(rows)], rows),
        ]

    def _address(self, place: int) -> int:
        return self._flags.data_ptr() + place * PLACE_BYTES

    def _ask(self, place: int) -> None:
        address = self._address(place)
        if self._device.type != "cuda":
            native.library().ft_place_ask(address)
        elif self.has_memory_operations:
            driver.write_value(self._stream, address + ASKED, 1)
        else:
            driver.launch_host_function(self._stream, _address_of("ft_place_ask"), address)

    def _wait(self, place: int) -> None:
        address = self._address(place)
        if self._device.type != "cuda":
            done = ctypes.c_uint64.from_address(address + DONE)
            while not done.value:  # the executor sees to that
                time.sleep(0)
        elif self.has_memory_operations:
            driver.wait_for_value(self._stream, address + DONE, 1)
        else:
            driver.launch_host_function(self._stream, _address_of("ft_place_wait"), address)

    @property
    def _stream(self) -> int:
        return int(torch.cuda.current_stream(self._device).cuda_stream)

    # --- steps ------------------------------------------------------------------------------------------------------

    def run(self, places: Sequence[int], launch: Launch) -> None:
        """Launch a step that asks at these places in this order. Raises what launching raises, and EngineError after a
        failure; either way the next step may be tried."""
        try:
            self.executor.expect(places)
            try:
                launch()
            except BaseException:
                self.executor.release()  # some of the places will never be asked at
                raise
            if self._device.type != "cuda":
                self.executor.wait(lambda: True)
        except BaseException:
            self.recover()
            raise

    def wait(self, is_over: Callable[[], bool]) -> None:
        """Until a step's work on the GPU is over. Raises EngineError where the CPU's part failed: then every step that
        was launched is worthless."""
        try:
            self.executor.wait(is_over)
        except EngineError:
            self.recover()
            raise

    def recover(self) -> None:
        """Let what is launched end, and forget the failure; where the CPU's thread has not come back, `is_there` says
        so until it has."""
        if self._device.type == "cuda":
            with suppress(RuntimeError):  # of a device that is lost, which the next launch says
                torch.cuda.synchronize(self._device)
        deadline = time.monotonic() + RETURN_S
        while self.executor.pending and time.monotonic() < deadline:
            time.sleep(1e-3)
        self._is_away = True
        if not self.is_there():
            logger.warning("the experts on the CPU have not come back from a step: until then all misses are fetched")

    def is_there(self) -> bool:
        """Whether the CPU takes part. One that was given up does so again when its thread has come back."""
        if self._is_away:
            try:
                self.executor.reset()
                self._is_away = False
            except EngineError as error:
                logger.debug("%s", error)
        return not self._is_away

    def close(self) -> None:
        """End the thread; harmless when repeated. Steps under way end without the CPU."""
        self.executor.release()
        if self._device.type == "cuda":
            with suppress(RuntimeError):
                torch.cuda.synchronize(self._device)
        self.executor.close()

    # --- what the CPU runs ------------------------------------------------------------------------------------------

    def _program(self, layer: int, n: int, activation: str) -> native.Program:
        """Native operations for the experts of a layer whose ids are handed over."""
        layer_banks = self._layers[layer]
        assert layer_banks is not None
        gate, up, down = layer_banks.banks
        program = native.Program(self._pool)
        acts: dict[int, np.ndarray] = {}
        for bank in (gate, up, down):
            native.can_decode(bank.type)
        for cls in dict.fromkeys(native.type_class(bank.type) for bank in (gate, up)):
            if cls:
                acts[cls] = self._activation(cls)
                program.add(
                    native.OP_QUANTIZE,
                    n,
                    p=(self._x.numpy(), acts[cls]),
                    i=(cls, self._n_embd, self._n_planes, self._n_embd),
                )
        act_gate, act_up = (acts.get(native.type_class(bank.type)) for bank in (gate, up))
        program.add(
            native.OP_EXPERTS,
            n,
            p=(
                self._x.numpy(),
                self._ids.numpy(),
                None,
                gate.address,
                up.address,
                down.address,
                self._rows.numpy(),
                None,
                self._scratch,
                act_gate,
                act_up if act_up is not act_gate else None,
            ),
            i=(
                gate.n_expert,
                self._n_used,
                self._n_embd,
                gate.rows,
                *(bank.type for bank in (gate, up, down)),
                *(quants.row_bytes(bank.type, bank.cols) for bank in (gate, up, down)),
                native.ACTIVATIONS[activation],
                self._n_planes,
                layer_banks.stride,
            ),
        )
        return program

    def _activation(self, cls: int) -> np.ndarray:
        """Room for the input rows in blocks of a class."""
        if cls not in self._activations:
            self._activations[cls] = native.aligned(native.act_bytes(cls, self._n_embd, MAX_TOKENS))
        return self._activations[cls]


def _address_of(function: str) -> int:
    address = ctypes.cast(getattr(native.library(), function), ctypes.c_void_p).value
    assert address is not None
    return address
