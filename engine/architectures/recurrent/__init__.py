"""Recurrent and hybrid models: decoders with layers that keep a state for each request.

Each module holds one family.
"""
