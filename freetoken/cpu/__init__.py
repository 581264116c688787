"""The CPU's implementations of `blocks.Ops`. Import torch through this package only: see below."""

import os

# OpenMP's threads, which torch uses, must sleep when idle. By default they spin, on the cores where the native pool's
# threads work, and on a machine that is busy with something else each of torch's small operations waits for a time
# slice: a prompt then took 13 s instead of 1.7 s. OpenMP reads this once, when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
