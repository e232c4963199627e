"""Adapters: their files and names, their memory on disk, host and device, and their use in
steps."""
