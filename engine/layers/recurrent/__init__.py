"""Layers that keep a state for each request instead of keys and values, one kind per module."""
