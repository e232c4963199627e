"""Tools and reasoning: how a model writes calls and thoughts, and what of it goes into an answer."""
