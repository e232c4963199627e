"""Tools and reasoning: how a model writes calls and thoughts, and what answers have of them."""
