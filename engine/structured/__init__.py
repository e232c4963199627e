"""Structured output: grammars of a request, and the tokens that they allow at each step.

llguidance does the matching; no torch here.
"""
