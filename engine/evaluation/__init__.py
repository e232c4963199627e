"""Comparisons of a model with transformers, of ways to run a model, and of weight formats."""
