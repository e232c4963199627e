"""The fields of every request body: what is taken, of which type and range, and what is refused.

The checks, /openapi.json and the tables of docs/http.md read them.
"""
