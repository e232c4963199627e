"""Adapters: read, named, moved between disk, host and device, and laid out for a step."""
