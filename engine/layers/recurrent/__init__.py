"""Layers that keep a state of a request in the place of keys and values, a module a kind."""
