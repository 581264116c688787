"""Triton kernels of the GPU engine and the form in which they keep weights. Arithmetic: docs/numerics.md.

Every launcher checks its tensors, writes into outputs that the caller gives and allocates nothing, so that a step can
be captured in a CUDA graph. No module here knows of files, requests or the engine.
"""
