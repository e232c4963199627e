"""Structured output: the grammars of requests, and the tokens that they allow at each step.

The matching is done by llguidance. No torch here.
"""
