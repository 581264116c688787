"""Routed experts larger than the GPU: the slot cache, the split of misses, and the pool's banks in the model file.

`slots` holds the rules as plain arrays, `device` the same on a GPU, `split` how many misses are filled, `bank` where
the experts lie. Called by the engine. Nothing here knows an architecture.
"""

from __future__ import annotations
