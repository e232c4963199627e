"""Attention blocks, with their projections; each module has one kind."""
