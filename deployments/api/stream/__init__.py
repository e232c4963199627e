"""Answers to generation requests: whole, or as streams that clients can resume."""
