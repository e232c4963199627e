"""The fields of every request body: the accepted ones with their types and ranges, and the refused
ones.

The checks of requests, /openapi.json and /docs are derived from these definitions.
"""
