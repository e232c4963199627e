"""The layout of GGUF files with a vision encoder (mmproj): an `Mmproj` entry for each projector.

llama.cpp writes a multimodal model's vision encoder into a separate file, with similar tensor names
for all families. `deployments.checkpoints.gguf_tower` converts the tensors to the names and shapes
of transformers' checkpoints. No torch here.
"""

from engine.architectures.mmproj.families import OTHERS
from engine.architectures.mmproj.kimi import KIMI
from engine.architectures.mmproj.qwen import QWEN
from engine.architectures.mmproj.record import Mmproj, Tower

MMPROJS: tuple[Mmproj, ...] = (*QWEN, *OTHERS, *KIMI)

__all__ = ["MMPROJS", "Mmproj", "Tower"]
