"""siglip_block: makes a layer of SigLIP, which several families have as their tower."""

from engine.models.vision.block import Block, PlainMLP
from engine.models.vision.tower import Tower


def siglip_block(
    tower: Tower,
    name: str,
    norms: tuple[str, str] = ("layer_norm1", "layer_norm2"),
    out: str = "out_proj",
) -> Block:
    """Make a layer of SigLIP.

    name: the beginning of the names of its tensors.
    norms, out: the names of its two norms, and of the matmul after attention.
    """
    width = tower.config.hidden_size
    return Block(
        tower,
        (
            tower.layer_norm(f"{name}.{norms[0]}", width),
            tower.layer_norm(f"{name}.{norms[1]}", width),
        ),
        tower.linear([f"{name}.self_attn.{part}_proj" for part in "qkv"], width, width),
        tower.closing(f"{name}.self_attn.{out}", width, width),
        PlainMLP(tower, f"{name}.mlp.fc1", f"{name}.mlp.fc2"),
    )
