"""Decoders of which layers keep a state of a request in the place of keys and values: what records
say of such layers, and a module a family."""
