"""torch, imported so that its OpenMP threads sleep when idle. `prefill` takes it from here, and it alone.

By default they spin, on the cores where the native pool's threads work, and on a machine that is busy with something
else each of torch's small operations waits for a time slice: a prompt took 13 s instead of 1.7 s. OpenMP reads this
once, when torch is loaded; other libraries in the process and its children keep what they had.
"""

import os

_POLICY = "OMP_WAIT_POLICY"
_is_ours = _POLICY not in os.environ
if _is_ours:
    os.environ[_POLICY] = "passive"

import torch  # noqa: E402

if _is_ours:
    del os.environ[_POLICY]

__all__ = ["torch"]
