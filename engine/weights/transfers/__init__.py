"""Transfers: weights that a trainer sends to a running engine, by broadcast or by handles."""
