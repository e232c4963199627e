"""Structured output: what an answer may be, as data that a request carries, and which tokens that
leaves at each step. By llguidance; no torch here."""
