"""Tools and reasoning: how a model writes calls and reasoning, and how answers show them."""
