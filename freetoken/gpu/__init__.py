"""The model on a GPU. `driver` asks the card and locks host memory (no torch), `verdict` says whether the GPU engine
can run here at all. Called by the runner and the commands; nothing here knows an architecture or a request.
"""

from __future__ import annotations
