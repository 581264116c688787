"""The engine on a GPU. `driver` asks the card and locks host memory (no torch), `verdict` says whether it can run here
at all; a model's `forward` is written down (`trace`), turned into launches of `freetoken.kernels` (`lower`) and
captured (`decode`). Called by the runner and the commands; nothing here knows an architecture or a request.
"""

from __future__ import annotations
