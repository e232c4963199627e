"""Speculation: drafts of a request's next tokens, and how many a step verifies.

The package works only on token ids. The scheduler gets the lengths of drafts from `DraftLengths`,
and tokens from each request's `Drafts`. Verification accepts the drafts that equal the sampled
tokens, so nothing here can change a text. See docs/speculation.md.
"""
