"""torch, imported so that its OpenMP threads sleep when idle. `prefill` takes it from here, and it alone."""

from freetoken.cores import sleeping_openmp

with sleeping_openmp():
    import torch

__all__ = ["torch"]
