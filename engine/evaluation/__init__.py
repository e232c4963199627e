"""Comparisons of a model's numbers with transformers, with itself and with another format."""
