"""Recurrent and hybrid models: decoders with layers that have a state for each request. A module a
family."""
