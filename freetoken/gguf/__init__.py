"""Model files: GGUF and FTW, mapped read-only, every size checked against the file before it is used. No torch.

`open_model` takes a file, any shard of a split model, or a folder. Nothing is copied: a tensor's `data` is a view of
the mapping, and large metadata arrays are decoded on first use. `Conversion` writes FTW files, `verify` checks them.
"""

from freetoken.gguf.convert import Conversion
from freetoken.gguf.ftw import verify
from freetoken.gguf.metadata import Metadata, StringArray
from freetoken.gguf.model import ModelFile, open_model
from freetoken.gguf.shard import Shard, Tensor

__all__ = ["Conversion", "Metadata", "ModelFile", "Shard", "StringArray", "Tensor", "open_model", "verify"]
