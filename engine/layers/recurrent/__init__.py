"""Layers with a recurrent state for each request instead of KV; each module has one kind."""
