"""The engine on a GPU: weights, cache, captured decode steps and prefill. Nothing here knows an architecture.

A model's `forward` is written down (`trace`), turned into launches of `freetoken.kernels` (`lower`) and captured
(`decode`).
"""
