"""The fields of every request body: which are accepted, of which type and range, and which refused.

The checks of requests, /openapi.json and /docs are derived from them.
"""
