"""Decoders with an MLP in each layer; each module holds one family."""
