"""Decoders in which layers have experts instead of an MLP; each module holds one family."""
