"""Comparisons of a model's outputs with transformers, between ways to run it, and of formats."""
