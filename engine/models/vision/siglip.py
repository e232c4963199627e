"""siglip_block: creates a layer of SigLIP, which several families use as vision encoder."""

from engine.models.vision.block import Block, PlainMLP
from engine.models.vision.tower import Tower


def siglip_block(
    tower: Tower,
    name: str,
    norms: tuple[str, str] = ("layer_norm1", "layer_norm2"),
    out: str = "out_proj",
) -> Block:
    """Create a layer of SigLIP.

    name: the prefix of the layer's tensor names.
    norms, out: the names of the two norms, and of the output projection of attention.
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
