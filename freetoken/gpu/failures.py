"""What torch and Triton raise when the GPU fails, as errors of ours: no memory is left, or the device is lost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from freetoken.errors import DeviceLostError, EngineError

__all__ = ["translated"]


@contextmanager
def translated(device: torch.device) -> Iterator[None]:
    """Raises EngineError for work that found no memory, after which the next may; DeviceLostError for a failed device,
    of which every later call fails too."""
    try:
        yield
    except torch.cuda.OutOfMemoryError as error:
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(device)
        raise EngineError(
            f"the GPU has no memory left for this request ({free / 2**20:.0f} MiB are free): other programs may use "
            "the card; start the server with a smaller context (-c), fewer expert slots (--moe-cache-rate) or -ub 512"
        ) from error
    except RuntimeError as error:
        if _is_lost(error):
            raise DeviceLostError(
                f"the GPU failed: {str(error).splitlines()[0]}; no request can be served until the server is started "
                "again"
            ) from error
        raise


def _is_lost(error: RuntimeError) -> bool:
    """Whether this is an error of CUDA itself, not of ours."""
    accelerator = getattr(torch, "AcceleratorError", None)
    if accelerator is not None and isinstance(error, accelerator):
        return True
    return "CUDA error" in str(error) or "Triton Error [CUDA]" in str(error)
