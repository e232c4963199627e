"""A discrete-event simulation of a fleet with the real routing and scaling functions:
docs/routing.md.
"""
