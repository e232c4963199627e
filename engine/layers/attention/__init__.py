"""Attention between its two projections, a module a kind."""
