"""siglip_block: makes a layer of SigLIP, which several families have as their tower."""

from engine.models.vision.block import Block, PlainMLP
from engine.models.vision.tower import Tower


def siglip_block(tower: Tower, name: str) -> Block:
    """Make a layer of SigLIP. name: before the names of its tensors."""
    width = tower.config.hidden_size
    return Block(
        tower,
        (
            tower.layer_norm(f"{name}.layer_norm1", width),
            tower.layer_norm(f"{name}.layer_norm2", width),
        ),
        tower.linear([f"{name}.self_attn.{part}_proj" for part in "qkv"], width, width),
        tower.closing(f"{name}.self_attn.out_proj", width, width),
        PlainMLP(tower, f"{name}.mlp.fc1", f"{name}.mlp.fc2"),
    )
