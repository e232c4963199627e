"""Decoders of which layers have experts in the place of an MLP, a module a family."""
