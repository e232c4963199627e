"""Decoders with an MLP in each layer, a module a family."""
