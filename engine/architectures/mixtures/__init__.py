"""Decoders with mixtures of experts; each module has one family."""
