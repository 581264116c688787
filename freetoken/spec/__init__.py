"""What a model is: its hyper-parameters from the metadata, its rotation tables, the tensors it must have. No torch.

`read_spec` bounds every number before anyone uses it; `check_tensors` then compares them with the shapes in the file.
How each architecture is treated follows llama.cpp (llama-model.cpp, llama-context.cpp, models/*.cpp of b11434).
"""

from freetoken.spec.angles import cos_sin
from freetoken.spec.model import SUPPORTED, ModelSpec, read_architecture, read_spec
from freetoken.spec.rope import Rope, RopeValues, rope_table
from freetoken.spec.tensors import check_tensors

__all__ = [
    "SUPPORTED",
    "ModelSpec",
    "Rope",
    "RopeValues",
    "check_tensors",
    "cos_sin",
    "read_architecture",
    "read_spec",
    "rope_table",
]
