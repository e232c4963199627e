"""Loads checkpoints into a model's parameters."""

from engine.weights.load import check_headers, load_weights

__all__ = ["check_headers", "load_weights"]
