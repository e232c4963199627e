"""The layout of GGUF files: a `Gguf` entry for each architecture. No torch here.

llama.cpp names tensors by their function, so most names follow from Manta's names (`STEMS`). An
entry has only the differences of its family. `deployments.checkpoints.gguf` converts a file to a
folder with the original checkpoint's names and row order, so that adapters fit.
"""

from engine.architectures.gguf.families import GGUFS
from engine.architectures.gguf.record import KEYS, Gguf, Metadata

__all__ = ["GGUFS", "KEYS", "Gguf", "Metadata"]
