"""What torch raises when a GPU fails becomes an error that says what to do."""

from __future__ import annotations

import pytest
import torch

from freetoken.errors import DeviceLostError, EngineError
from freetoken.gpu.failures import translated

CPU = torch.device("cpu")


def test_no_memory_is_an_error_of_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (5 << 20, 8 << 30))
    with pytest.raises(EngineError, match=r"no memory left .* \(5 MiB are free\).*-c") as caught, translated(CPU):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")
    assert not isinstance(caught.value, DeviceLostError)


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nmore"),
        RuntimeError("Triton Error [CUDA]: unspecified launch failure"),
    ],
)
def test_a_lost_device_is_one_of_the_process(error: RuntimeError) -> None:
    with pytest.raises(DeviceLostError, match=r"(access was encountered|launch failure); no request"), translated(CPU):
        raise error


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(RuntimeError, match="shape"), translated(CPU):
        raise RuntimeError("shape mismatch")
