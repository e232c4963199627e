"""The fields of every request body: what is taken, of which type and range, and what is refused.

The checks, /openapi.json and /docs read them.
"""
