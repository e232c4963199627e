"""Ollama's /api/chat, /api/tags and /api/version, for clients that speak nothing else."""
