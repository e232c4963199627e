"""Reading checkpoints into a model's parameters."""

from engine.weights.load import load_weights

__all__ = ["load_weights"]
