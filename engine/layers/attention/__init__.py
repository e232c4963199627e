"""Attention between its two projections; each module holds one kind."""
