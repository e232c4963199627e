"""Recurrent and hybrid models: decoders in which layers have a state for each request.

Each module has one family.
"""
