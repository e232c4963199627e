"""Speculation: drafts of a request's next tokens, and how many a step verifies.

The package knows token ids alone. The scheduler asks `DraftLengths` for the length of drafts and
each request's `Drafts` for tokens; verification accepts the drafts that equal the sampled tokens,
so nothing here can change a text. See docs/speculation.md.
"""
